// Dropout whose mask depends on the key and the index in the global tensor, not on who computes it:
// equal on every mesh. It is linear in its input, so that its backward is the operator itself on
// the gradient: the mask is drawn again and takes no memory.

#include "fused/fused_operator.h"
#include "tessera/core/error.h"
#include "tessera/core/flat_place.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/kernels/detail/random.h"

namespace tessera::detail {
namespace {

/// `seed` and `stream` are the bits of a key. They are Scalars, as is `first_element`, the number
/// of x's first element among those that one mask is drawn for: values of Scalars are not part of a
/// call's key, and every call has another stream. `place`: flat_place() of x; empty: x is whole.
struct Dropout : FusedOperator<Dropout, at::Tensor(const at::Tensor&, double, const at::Scalar&,
                                                   const at::Scalar&, const at::Scalar&,
                                                   c10::SymIntArrayRef)> {
  static constexpr const char* name = "tessera::dropout";
  static constexpr const char* signature =
      "(Tensor x, float p, Scalar seed, Scalar stream, Scalar first_element=0, SymInt[] place=[])"
      " -> Tensor";
};

std::uint64_t bits_of(const at::Scalar& number) {
  return static_cast<std::uint64_t>(number.toLong());
}
at::Scalar number_of(std::uint64_t bits) {
  return static_cast<std::int64_t>(bits);
}

kernels::GlobalPlace place_of(const at::Tensor& x, c10::IntArrayRef place, std::int64_t first) {
  if (place.empty()) {
    return kernels::GlobalPlace::whole(x.sizes().vec(), first);
  }
  FlatPlace part = read_flat_place(place, static_cast<std::size_t>(x.dim()));
  return {std::move(part.boxes), std::move(part.sizes), first};
}

at::Tensor run_dropout(const at::Tensor& x, double p, const at::Scalar& seed,
                       const at::Scalar& stream, const at::Scalar& first_element,
                       c10::SymIntArrayRef place) {
  TESSERA_CHECK(p >= 0.0 && p < 1.0, "dropout with probability ", p,
                " was asked for; it must be in [0, 1)");
  if (x.is_meta()) {
    return at::empty_like(x, at::MemoryFormat::Contiguous);
  }
  return kernels::dropout(x, place_of(x, C10_AS_INTARRAYREF_SLOW(place), first_element.toLong()), p,
                          {bits_of(seed), bits_of(stream)});
}

std::optional<ShardingRule> dropout_rule(const OpCall& call) {
  std::optional<ShardingRule> rule = elementwise_rule(1)(call);
  rule->place_arguments = {{.arg = 5, .input = 0}};
  return rule;
}

struct DropoutNode final : FusedNode {
  DropoutNode() : FusedNode("dropout", "DropoutBackward") {}
  double p = 0;
  at::Scalar seed, stream, first_element;
  std::vector<c10::SymInt> place;

 private:
  torch::autograd::variable_list differentiate(const at::Tensor& gradient) override {
    return {Dropout::call(gradient, p, seed, stream, first_element, place)};
  }
};

at::Tensor differentiable_dropout(const at::Tensor& x, double p, const at::Scalar& seed,
                                  const at::Scalar& stream, const at::Scalar& first_element,
                                  c10::SymIntArrayRef place) {
  const auto node = node_for<DropoutNode>(x);
  if (node != nullptr) {
    node->p = p;
    node->seed = seed;
    node->stream = stream;
    node->first_element = first_element;
    node->place = place.vec();
  }
  return recorded(node, Dropout::call_below_autograd(x, p, seed, stream, first_element, place));
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  define<Dropout>(library, &run_dropout, dropout_rule, &differentiable_dropout);
}

}  // namespace

at::Tensor dropout(const at::Tensor& x, double p, RandomKey key, std::int64_t first_element) {
  return Dropout::call(x, p, number_of(key.seed), number_of(key.stream), first_element, {});
}

}  // namespace tessera::detail
