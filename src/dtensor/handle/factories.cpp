// Factories of distributed tensors. Each rank makes its shard and fills it from the global index of
// its elements, so nothing is sent and every mesh gets the same tensor.

#include "tessera/dtensor/factories.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <functional>

#include "redistribute/redistribute.h"
#include "tensor/tensor_spec.h"
#include "tessera/core/detail/rounding.h"
#include "tessera/core/error.h"
#include "tessera/core/layout_math.h"

namespace tessera {
namespace {

/// The mesh's device, unless the options name one (meta).
at::TensorOptions on_mesh(at::TensorOptions options, const DeviceMesh& mesh) {
  return options.has_device() ? options : options.device(mesh.device());
}

/// Makes an empty distributed tensor without partials, lets `fill` write its values, then makes it
/// partial where asked for. `requires_grad` is set last, so that the result is a leaf and not the
/// output of a redistribution.
DistributedTensor make(const std::vector<std::int64_t>& sizes, const DeviceMesh& mesh,
                       const Placements& placements, const at::TensorOptions& options,
                       const std::function<void(const at::Tensor&)>& fill) {
  TESSERA_CHECK(std::ranges::all_of(sizes, [](std::int64_t size) { return size >= 0; }),
                "a factory: a tensor of sizes ", c10::IntArrayRef(sizes),
                " cannot be; give sizes of at least 0");
  const auto target = to_layout(mesh.shape().sizes(), placements, sizes);
  const ShardingSpec without_partials{mesh, detail::gradient_layout(target)};
  const auto local = at::empty(detail::local_sizes(without_partials, sizes),
                               on_mesh(options, mesh).requires_grad(std::nullopt));
  detail::check_partials(*target, local.scalar_type(), "a factory");
  const auto made = make_distributed(local, without_partials, sizes);
  if (!local.is_meta()) {
    fill(made);
  }
  auto result = DistributedTensor(made).redistribute(target);
  if (options.requires_grad()) {
    result.tensor().requires_grad_();
  }
  return result;
}

/// How many values arange has; the last step may overshoot `end`. Throws Error for a range that
/// never ends or goes the wrong way.
std::int64_t steps_between(std::int64_t start, std::int64_t end, std::int64_t step) {
  TESSERA_CHECK(step != 0, "arange from ", start, " to ", end, " with step 0 never ends");
  const auto distance = step > 0 ? end - start : start - end;
  const auto stride = step > 0 ? step : -step;
  TESSERA_CHECK(distance >= 0, "arange from ", start, " to ", end, " with step ", step,
                " goes the wrong way: change the step's sign");
  return detail::ceil_div(distance, stride);
}

}  // namespace

DistributedTensor empty(std::vector<std::int64_t> sizes, const DeviceMesh& mesh,
                        const Placements& placements, at::TensorOptions options) {
  return make(sizes, mesh, placements, options, [](const at::Tensor&) {});
}

DistributedTensor full(std::vector<std::int64_t> sizes, const at::Scalar& value,
                       const DeviceMesh& mesh, const Placements& placements,
                       at::TensorOptions options) {
  return make(sizes, mesh, placements, options,
              [&](const at::Tensor& t) { local_tensor(t).fill_(value); });
}

DistributedTensor zeros(std::vector<std::int64_t> sizes, const DeviceMesh& mesh,
                        const Placements& placements, at::TensorOptions options) {
  return full(std::move(sizes), 0, mesh, placements, options);
}

DistributedTensor ones(std::vector<std::int64_t> sizes, const DeviceMesh& mesh,
                       const Placements& placements, at::TensorOptions options) {
  return full(std::move(sizes), 1, mesh, placements, options);
}

DistributedTensor arange(std::int64_t start, std::int64_t end, std::int64_t step,
                         const DeviceMesh& mesh, const Placements& placements,
                         at::TensorOptions options) {
  const auto count = steps_between(start, end, step);
  if (!options.has_dtype()) {
    options = options.dtype(at::kLong);
  }
  return make({count}, mesh, placements, options, [&](const at::Tensor& t) {
    const auto& layout = *sharding_spec(t).layout;
    // Shards need not be one range: with a strided shard they are several.
    const auto indices = global_indices(layout, 0, count, mesh.coordinate());
    local_tensor(t).copy_(at::tensor(indices, at::kLong).mul(step).add(start));
  });
}

DistributedTensor rand(std::vector<std::int64_t> sizes, RandomKey key, const DeviceMesh& mesh,
                       const Placements& placements, at::TensorOptions options) {
  return make(sizes, mesh, placements, options,
              [&](const at::Tensor& t) { uniform_(t, 0, 1, key); });
}

DistributedTensor randn(std::vector<std::int64_t> sizes, RandomKey key, const DeviceMesh& mesh,
                        const Placements& placements, at::TensorOptions options) {
  return make(sizes, mesh, placements, options,
              [&](const at::Tensor& t) { normal_(t, 0, 1, key); });
}

}  // namespace tessera
