// What the fused functions share: between the distributed arguments that autograd sees and the
// local tensors that kernels take. A fused function is one operator for autograd, so that these
// conversions happen once and not at every step of its formula.

#include "functional/autograd_helpers.h"

#include <c10/core/GradMode.h>

#include "tessera/core/error.h"
#include "tessera/dtensor/detail/parameter_name.h"

namespace tessera::nn {

MaybeSpec spec_of(const at::Tensor& tensor) {
  if (!tessera::is_distributed(tensor)) {
    return std::nullopt;
  }
  return sharding_spec(tensor);
}

at::Tensor wrap_local(const at::Tensor& local, const MaybeSpec& spec,
                      const std::vector<std::int64_t>& sizes) {
  return spec ? make_distributed(local, *spec, sizes) : local;
}

at::Tensor local_gradient(const at::Tensor& grad, const MaybeSpec& spec) {
  if (!spec) {
    // The forward had plain tensors, so that there is no layout to bring the gradient to.
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
  // The usual case: no call of the planner.
  if (sharding_spec(grad) == *spec) {
    return local_tensor(grad);
  }
  return local_tensor(DistributedTensor(grad).redistribute(spec->layout).tensor());
}

/// Gradient mode is on in a backward only if that is recorded (create_graph). Without this check
/// the second gradient would be wrong, and no error.
std::string quoted_name(const at::Tensor& parameter) {
  const std::string name = tessera::detail::parameter_name(parameter);
  return name.empty() ? "" : " '" + name + "'";
}

void refuse_double_backward(const char* function) {
  TESSERA_CHECK(!c10::GradMode::is_enabled(), function,
                " is differentiable once; a gradient of its gradient was asked for "
                "(create_graph): write it with at:: operators there");
}

/// The terms of a pending sum are not its values: most of the functions are not linear, and none
/// has a rule for terms.
void refuse_partial(const char* function, const MaybeSpec& spec) {
  TESSERA_CHECK(!spec || !spec->layout->is_partial(), function, " of a tensor of layout ",
                to_string(*spec->layout),
                " was asked for, which is a pending sum; redistribute it first");
}

}  // namespace tessera::nn
