// Rotary position embeddings on (batch, sequence, heads, head_dim), by tables of cos and sin. A
// rotation is orthogonal, so that backward is the transposed rotation of the gradient and needs no
// input.

#include <torch/csrc/autograd/custom_function.h>

#include "functional/autograd_helpers.h"
#include "tessera/core/error.h"
#include "tessera/kernels/detail/fused.h"
#include "tessera/nn/functional.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void check(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  TESSERA_CHECK(x.dim() == 4 && x.size(3) % 2 == 0, "rotary_embedding of sizes ", x.sizes(),
                " was asked for; it takes (batch, sequence, heads, head_dim), head_dim even");
  for (const at::Tensor* table : {&cos, &sin}) {
    TESSERA_CHECK(table->dim() == 2 && table->size(0) == x.size(1) && table->size(1) == x.size(3),
                  "rotary_embedding of sizes ", x.sizes(), " was asked for with a table of sizes ",
                  table->sizes(), "; it takes (sequence, head_dim)");
    // Computed from positions alone, so that every rank makes the same.
    TESSERA_CHECK(!tessera::is_distributed(*table) && !table->requires_grad(),
                  "rotary_embedding takes plain tables that need no gradient");
  }
  const MaybeSpec spec = spec_of(x);
  refuse_partial("rotary_embedding", spec);
  TESSERA_CHECK(
      // The tables are indexed by position, and the pairs that turn are within a head.
      !spec || (spec->layout->mesh_dims_of(1).empty() && spec->layout->mesh_dims_of(3).empty()),
      "rotary_embedding of a tensor of layout ", to_string(*spec->layout),
      " was asked for; batch and heads may be split only: redistribute it first");
}

struct RotaryFunction : torch::autograd::Function<RotaryFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& cos,
                            const at::Tensor& sin) {
    // The tables, which all layers share; x is not needed.
    context->save_for_backward({cos, sin});
    context->set_materialize_grads(false);
    const MaybeSpec spec = spec_of(x);
    save_value(context, spec);
    return wrap_local(kernels::rotary_embedding(local_tensor(x), cos, sin, false), spec,
                      x.sizes().vec());
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_double_backward("rotary_embedding");
    if (!grads[0].defined()) {
      return {{}, {}, {}};
    }
    const variable_list saved = context->get_saved_variables();
    const MaybeSpec& spec = saved_value<MaybeSpec>(context);
    const at::Tensor x_grad = kernels::rotary_embedding(local_gradient(grads[0], spec), saved[0],
                                                        saved[1], /*transposed=*/true);
    // The tables need no gradient, as check() has made sure.
    return {wrap_local(x_grad, spec, grads[0].sizes().vec()), {}, {}};
  }
};

}  // namespace

at::Tensor rotary_embedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  check(x, cos, sin);
  return RotaryFunction::apply(x, cos, sin);
}

}  // namespace tessera::nn
