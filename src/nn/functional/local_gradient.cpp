#include "local_gradient.h"

#include <c10/core/GradMode.h>

#include "tessera/core/error.h"

namespace tessera::nn {

MaybeSpec spec_of(const at::Tensor& tensor) {
  if (!tessera::is_distributed(tensor)) return std::nullopt;
  return sharding_spec(tensor);
}

at::Tensor wrap_local(const at::Tensor& local, const MaybeSpec& spec,
                      const std::vector<std::int64_t>& sizes) {
  return spec ? make_distributed(local, *spec, sizes) : local;
}

at::Tensor local_gradient(const at::Tensor& grad, const MaybeSpec& spec) {
  if (!spec) {
    TESSERA_CHECK(!tessera::is_distributed(grad),
                  "a distributed gradient came to a function of plain tensors");
    return grad;
  }
  if (!tessera::is_distributed(grad)) {
    // Some of libtorch's formulas make plain tensors: the same on every rank.
    const Placements whole(static_cast<std::size_t>(spec->mesh.ndim()), Replicate{});
    return local_tensor(
        distribute_tensor(grad, spec->mesh, whole).redistribute(spec->layout).tensor());
  }
  if (sharding_spec(grad) == *spec) return local_tensor(grad);
  return local_tensor(DistributedTensor(grad).redistribute(spec->layout).tensor());
}

void refuse_double_backward(const char* function) {
  TESSERA_CHECK(!c10::GradMode::is_enabled(), function,
                " is differentiable once; a gradient of its gradient was asked for "
                "(create_graph): write it with at:: operators there");
}

void refuse_partial(const char* function, const MaybeSpec& spec) {
  TESSERA_CHECK(!spec || !spec->layout->is_partial(), function, " of a tensor of layout ",
                to_string(*spec->layout),
                " was asked for, which is a pending sum; redistribute it first");
}

}  // namespace tessera::nn
