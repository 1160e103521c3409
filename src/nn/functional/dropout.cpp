// Dropout whose mask depends on the key and the index in the global tensor, not on who computes it:
// equal on every mesh. The mask is drawn again in backward, so that it takes no memory.

#include "functional/autograd_helpers.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/functional.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What backward needs: the key of the mask, which elements of it this rank has, and the tensor's
/// sharding.
struct Mask {
  double p;
  RandomKey key;
  tessera::detail::RandomPlace place;
  MaybeSpec spec;
};

at::Tensor draw(const Mask& mask, const at::Tensor& local, const at::Tensor& x) {
  return wrap_local(tessera::detail::dropout(local, mask.place, mask.p, mask.key), mask.spec,
                    x.sizes().vec());
}

struct DropoutFunction : torch::autograd::Function<DropoutFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Mask& mask) {
    // An undefined gradient stays undefined instead of becoming zeros, and costs nothing.
    context->set_materialize_grads(false);
    save_value(context, mask);
    return draw(mask, local_tensor(x), x);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_double_backward("dropout");
    if (!grads[0].defined()) {
      return {{}, {}};
    }
    const Mask& mask = saved_value<Mask>(context);
    // The mask and the scale applied to the gradient: dropout is linear in its input.
    return {draw(mask, local_gradient(grads[0], mask.spec), grads[0]), {}};
  }
};

/// Keys are the callers', who may use one twice.
RandomKey next_id() {
  thread_local std::uint64_t calls = 0;
  return {stream_of("nn::dropout"), replayed_count(calls)};
}

}  // namespace

at::Tensor dropout(const at::Tensor& x, double p, RandomKey key) {
  const MaybeSpec spec = spec_of(x);
  refuse_partial("dropout", spec);
  // Before the function, in which a tensor has no history.
  const auto place = tessera::detail::random_place({"dropout", x, x, next_id()});
  return DropoutFunction::apply(x, Mask{p, key, place, spec});
}

}  // namespace tessera::nn
