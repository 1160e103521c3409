#include "local_gradient.h"
#include "saved_value.h"
#include "tessera/nn/functional.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What the mask is drawn from, and where the tensor lies: all that backward needs.
struct Mask {
  double p;
  RandomKey key;
  std::int64_t first_element;
  MaybeSpec spec;
};

at::Tensor draw(const Mask& mask, const at::Tensor& x) {
  return apply_dropout(x, mask.p, mask.key, mask.first_element);
}

struct DropoutFunction : torch::autograd::Function<DropoutFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Mask& mask) {
    context->set_materialize_grads(false);
    save_value(context, mask);
    return draw(mask, x);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_double_backward("dropout");
    if (!grads[0].defined()) return {{}, {}};
    const Mask& mask = saved_value<Mask>(context);
    const at::Tensor local = local_gradient(grads[0], mask.spec);
    return {draw(mask, wrap_local(local, mask.spec, grads[0].sizes().vec())), {}};
  }
};

}  // namespace

at::Tensor dropout(const at::Tensor& x, double p, RandomKey key) {
  const MaybeSpec spec = spec_of(x);
  refuse_partial("dropout", spec);
  return DropoutFunction::apply(x, Mask{p, key, BatchPart::first_element(x.numel()), spec});
}

}  // namespace tessera::nn
