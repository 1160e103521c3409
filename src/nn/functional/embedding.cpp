// Embedding lookups where the table may be split by rows (vocabulary parallel), by columns or not
// at all, and the indices by rows. Split by rows, each rank looks up what it has and gives zeros
// for the rest: a result of terms of a sum. Backward writes a dense gradient of the rank's rows.

#include "functional/autograd_helpers.h"
#include "tessera/core/error.h"
#include "tessera/core/layout_math.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/kernels/detail/fused.h"
#include "tessera/nn/functional.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The sharding of one call: the rows of the table on this rank, and the specs of the results.
struct Spread {
  std::int64_t first_row = 0;
  std::int64_t local_rows = 0;
  MaybeSpec out;
  MaybeSpec out_grad;     ///< a pending sum's gradient is the same on all ranks
  MaybeSpec weight_grad;  ///< partial where the indices are split
};

/// A pending sum over each of these mesh dimensions, for a layout.
std::vector<PartialDim> sums_over(const std::vector<int>& mesh_dims) {
  std::vector<PartialDim> partial;
  for (const int d : mesh_dims) {
    partial.push_back({d, ReduceOp::kSum});
  }
  return partial;
}

/// Along a mesh dimension the table may be sharded, or the indices, but not both.
void check(const at::Tensor& weight, const at::Tensor& indices) {
  TESSERA_CHECK(weight.dim() == 2, "embedding: the table has sizes ", weight.sizes(),
                "; it must have two dimensions");
  TESSERA_CHECK(indices.scalar_type() == c10::ScalarType::Long,
                "embedding: the indices are of type ", indices.scalar_type(),
                "; they must be int64");
  const MaybeSpec table = spec_of(weight);
  const MaybeSpec places = spec_of(indices);
  refuse_partial("embedding", table);
  refuse_partial("embedding", places);
  // As at:: operators: ranks may hold different indices, of which a sum over ranks would make one.
  TESSERA_CHECK(!table || places || indices.numel() <= 1 ||
                    tessera::detail::plain_is_replicated_on(table->mesh),
                "embedding: the table", quoted_name(weight), " is distributed, but the indices, ",
                indices.sizes(), ", are plain; call the module as (*m)(x) and not as ",
                "m->forward(x), so that its hooks run, distribute the indices, or state in a "
                "ReplicationScope that they are equal on all ranks");
  if (!places) {
    return;
  }
  TESSERA_CHECK(
      table && table->mesh == places->mesh,
      "embedding: the indices are distributed on a mesh where the table is not; distribute "
      "the table on it, or pass local indices");
  for (int d = 0; d < table->layout->mesh_ndim(); ++d) {
    TESSERA_CHECK(table->layout->sharded_dim(d) < 0 || places->layout->sharded_dim(d) < 0,
                  "embedding: mesh dimension ", d, " splits both the table (",
                  to_string(*table->layout), ") and the indices (", to_string(*places->layout),
                  "); redistribute the indices to Replicate on it");
  }
}

/// The indices' splits, then that of the table's columns; the splits of its rows become sums.
ShardingSpec result_spec(const ShardingSpec& table, const MaybeSpec& places, std::int64_t dims) {
  Layout::Dims digits =
      places ? places->layout->dims() : Layout::Dims(static_cast<std::size_t>(dims));
  digits.push_back(table.layout->digits(1));
  return {table.mesh, Layout::intern(table.layout->mesh_sizes(), std::move(digits),
                                     sums_over(table.layout->mesh_dims_of(0)))};
}

/// As the table, and a sum over the mesh dimensions that split the indices: each rank has seen its
/// part of them.
ShardingSpec weight_gradient_spec(const ShardingSpec& table, const MaybeSpec& places) {
  std::vector<int> split;
  for (int d = 0; places && d < places->layout->mesh_ndim(); ++d) {
    if (places->layout->sharded_dim(d) >= 0) {
      split.push_back(d);
    }
  }
  return {table.mesh,
          Layout::intern(table.layout->mesh_sizes(), table.layout->dims(), sums_over(split))};
}

Spread spread_of(const at::Tensor& weight, const at::Tensor& indices) {
  Spread spread;
  spread.local_rows = local_tensor(weight).size(0);
  const MaybeSpec table = spec_of(weight);
  if (!table) {
    return spread;
  }
  const std::vector<Box> boxes =
      owned_boxes(*table->layout, weight.sizes(), table->mesh.coordinate());
  TESSERA_CHECK(boxes.size() <= 1,
                "embedding: the rows of the table at one rank are not one block (",
                to_string(*table->layout), "); distribute it by Shard(0) alone");
  // A rank may have no rows. Its first row is 0 then, and no index is in its range.
  if (!boxes.empty()) {
    spread.first_row = boxes[0].global_offset[0];
  }
  const MaybeSpec places = spec_of(indices);
  spread.out = result_spec(*table, places, indices.dim());
  // The result's layout without its sums: the gradient of a sum's terms is the sum's gradient.
  spread.out_grad = ShardingSpec{
      table->mesh, Layout::intern(table->layout->mesh_sizes(), spread.out->layout->dims())};
  spread.weight_grad = weight_gradient_spec(*table, places);
  return spread;
}

struct EmbeddingFunction : torch::autograd::Function<EmbeddingFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight,
                            const at::Tensor& indices) {
    const Spread spread = spread_of(weight, indices);
    context->save_for_backward({indices});
    context->set_materialize_grads(false);
    // Not the table itself: backward needs its sizes alone.
    context->saved_data["sizes"] = weight.sizes().vec();
    save_value(context, spread);
    std::vector<std::int64_t> sizes = indices.sizes().vec();
    sizes.push_back(weight.size(1));
    // The global number of rows is passed to tell an index of another rank from a wrong one.
    const at::Tensor local = kernels::embedding_rows(local_tensor(weight), local_tensor(indices),
                                                     spread.first_row, weight.size(0));
    return wrap_local(local, spread.out, sizes);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_double_backward("embedding");
    if (!grads[0].defined()) {
      return {{}, {}};
    }
    const Spread& spread = saved_value<Spread>(context);
    const at::Tensor local = kernels::embedding_rows_backward(
        local_gradient(grads[0], spread.out_grad), local_tensor(context->get_saved_variables()[0]),
        spread.first_row, spread.local_rows);
    return {wrap_local(local, spread.weight_grad, context->saved_data["sizes"].toIntVector()), {}};
  }
};

}  // namespace

at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices) {
  check(weight, indices);
  return EmbeddingFunction::apply(weight, indices);
}

}  // namespace tessera::nn
