// Checks and properties of every distributed tensor that is made from a local one.

#include "tensor/local_part.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "tessera/core/error.h"
#include "tessera/core/layout_math.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {
namespace {

/// Goes to the next coordinate in the dimensions `dims` of a mesh; false after the last.
bool advance(std::vector<std::int64_t>& coordinate, const std::set<int>& dims,
             const std::vector<std::int64_t>& mesh_sizes) {
  for (const int dim : dims) {
    const auto at = static_cast<std::size_t>(dim);
    if (++coordinate[at] < mesh_sizes[at]) {
      return true;
    }
    coordinate[at] = 0;
  }
  return false;
}

/// Where parts with one layout are not of the sizes of those with the other; empty: nowhere. Looks
/// along the mesh dimensions alone by which the layouts cut a dimension differently.
std::vector<std::int64_t> coordinate_of_other_parts(const Layout& layout, const Layout& other,
                                                    c10::IntArrayRef sizes) {
  std::vector<std::int64_t> coordinate(layout.mesh_sizes().size(), 0);
  for (int dim = 0; dim < layout.tensor_ndim(); ++dim) {
    if (layout.digits(dim) == other.digits(dim)) {
      continue;
    }
    std::set<int> cut;
    for (const Layout* each : {&layout, &other}) {
      std::ranges::copy(each->mesh_dims_of(dim), std::inserter(cut, cut.end()));
    }
    do {
      const std::int64_t size = sizes[static_cast<std::size_t>(dim)];
      if (local_size(layout, dim, size, coordinate) != local_size(other, dim, size, coordinate)) {
        return coordinate;
      }
    } while (advance(coordinate, cut, layout.mesh_sizes()));
  }
  return {};
}

}  // namespace

const DistributedTensorImpl& impl_of_distributed(const at::Tensor& tensor) {
  TESSERA_CHECK(tensor.defined(), "a distributed tensor was expected, found an undefined one");
  const auto* impl = as_distributed(tensor);
  TESSERA_CHECK(impl != nullptr, "a distributed tensor was expected, found a plain one of sizes ",
                tensor.sizes(), ": wrap it with from_local or distribute_tensor");
  return *impl;
}

void check_plain(const at::Tensor& local) {
  TESSERA_CHECK(local.defined(),
                "from_local of an undefined tensor; pass this rank's part, of 0 rows where it has "
                "none");
  TESSERA_CHECK(!tessera::is_distributed(local),
                "from_local of a tensor that is distributed already: "
                "redistribute() changes its placements");
}

void check_local(const at::Tensor& local, const ShardingSpec& spec,
                 const std::vector<std::int64_t>& sizes) {
  check_plain(local);
  check_partials(*spec.layout, local.scalar_type(), "from_local");
  const auto expected = local_sizes(spec, sizes);
  TESSERA_CHECK(local.sizes() == expected, "from_local: rank ", spec.mesh.world()->rank(), " of ",
                to_string(spec.mesh), " holds ", c10::IntArrayRef(expected), " of a tensor of ",
                c10::IntArrayRef(sizes), " as ", describe(*spec.layout, sizes), ", found ",
                local.sizes(), ": with uneven shards pass the global sizes");
}

void check_gradient_parts(const char* asked, const Layout& layout, const Layout& gradient,
                          c10::IntArrayRef sizes) {
  const std::vector<std::int64_t> other = coordinate_of_other_parts(layout, gradient, sizes);
  TESSERA_CHECK(other.empty(), asked, ": gradients of a ",
                c10::IntArrayRef(local_sizes(layout, sizes, other)), " part cannot be ",
                describe(gradient, sizes), " of ", sizes,
                "; name placements with parts of that size");
}

at::Tensor dense_local(const at::Tensor& local, const ShardingSpec& sharding,
                       c10::IntArrayRef sizes) {
  const bool agreed = shards_agree_on_stride_order(*sharding.layout, sizes);
  return !local.is_non_overlapping_and_dense() || (!agreed && !local.is_contiguous())
             ? local.contiguous()
             : local;
}

at::Tensor wrap_local(const at::Tensor& local, const ShardingSpec& sharding,
                      c10::IntArrayRef sizes) {
  const bool agreed = shards_agree_on_stride_order(*sharding.layout, sizes);
  auto strides = global_strides(sizes, local.strides(), agreed);
  return wrap(alias_tensor(local),
              intern_spec({sharding, sizes.vec(), std::move(strides), local.scalar_type()}));
}

}  // namespace tessera::detail
