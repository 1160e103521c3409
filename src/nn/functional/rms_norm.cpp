// RMS norm as one autograd function over the fused kernel: x / rms(x) * weight along the last
// dimension. Rows are independent, so that any other dimension may be split. Saves x and one number
// a row.

#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "functional/autograd_helpers.h"
#include "tessera/core/error.h"
#include "tessera/kernels/detail/fused.h"
#include "tessera/nn/functional.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void check(const at::Tensor& x, const at::Tensor& weight) {
  const MaybeSpec x_spec = spec_of(x);
  TESSERA_CHECK(x.dim() > 0, "rms_norm of a scalar was asked for");
  // The weight is optional: at::Tensor() is a norm without one.
  if (weight.defined()) {
    TESSERA_CHECK(weight.dim() == 1 && weight.size(0) == x.size(-1), "rms_norm of sizes ",
                  x.sizes(), " was asked for with a weight of sizes ", weight.sizes());
    const MaybeSpec spec = spec_of(weight);
    TESSERA_CHECK(spec || !x_spec, "rms_norm of a distributed tensor with the plain weight",
                  quoted_name(weight),
                  "; give its module a style in the plan of parallelize_module "
                  "(replicate_parallel, sequence_parallel), so that it is distributed too");
    TESSERA_CHECK(!spec || x_spec, "rms_norm of the plain tensor, ", x.sizes(),
                  ", with the distributed weight", quoted_name(weight),
                  "; call the module as (*m)(x) and not as m->forward(x), so that its hooks run");
    TESSERA_CHECK(!spec || (spec->mesh == x_spec->mesh && spec->layout->is_replicated()),
                  "rms_norm needs a weight that is replicated on the mesh of its input");
  }
  refuse_partial("rms_norm", x_spec);
  TESSERA_CHECK(!x_spec || x_spec->layout->mesh_dims_of(static_cast<int>(x.dim()) - 1).empty(),
                "rms_norm of a tensor of layout ", to_string(*x_spec->layout),
                " was asked for; its last dimension must be whole: redistribute it first");
}

/// Each rank has the terms of its rows.
ShardingSpec weight_gradient_spec(const ShardingSpec& x) {
  std::vector<PartialDim> partial;
  for (int d = 0; d < x.layout->mesh_ndim(); ++d) {
    if (x.layout->sharded_dim(d) >= 0) {
      partial.push_back({d, ReduceOp::kSum});
    }
  }
  return {x.mesh, Layout::intern(x.layout->mesh_sizes(), Layout::Dims(1), std::move(partial))};
}

struct RmsNormFunction : torch::autograd::Function<RmsNormFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const std::optional<at::Tensor>& maybe_weight, double eps) {
    const at::Tensor weight = maybe_weight.value_or(at::Tensor());
    auto [out, rstd] =
        kernels::rms_norm(local_tensor(x), weight.defined() ? local_tensor(weight) : weight, eps);
    // rstd, one number a row, saves a pass over x in backward.
    context->save_for_backward({x, weight, rstd});
    context->set_materialize_grads(false);
    return wrap_local(out, spec_of(x), x.sizes().vec());
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_double_backward("rms_norm");
    if (!grads[0].defined()) {
      return {{}, {}, {}};
    }
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& weight = saved[1];
    const MaybeSpec spec = spec_of(x);
    auto [x_grad, weight_grad] =
        kernels::rms_norm_backward(local_gradient(grads[0], spec), local_tensor(x),
                                   weight.defined() ? local_tensor(weight) : weight, saved[2]);
    // Left as a pending sum, so that the caller's layer sums it with the gradients of other weights
    // (PendingGradients, FSDP).
    if (spec && weight_grad.defined()) {
      weight_grad = make_distributed(weight_grad, weight_gradient_spec(*spec), {x.size(-1)});
    }
    return {wrap_local(x_grad, spec, x.sizes().vec()), weight_grad, {}};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  check(x, weight);
  return RmsNormFunction::apply(x, weight.defined() ? std::optional(weight) : std::nullopt, eps);
}

}  // namespace tessera::nn
