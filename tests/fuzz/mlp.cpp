// The other half of a block: projections with operators between them that know no mesh.

#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sort.h>

#include <tuple>

#include "fuzz/model.h"
#include "fuzz/operators.h"
#include "tessera/nn/functional.h"

namespace tessera::fuzz {
namespace {

at::Tensor apply_along(Along along, const at::Tensor& x) {
  switch (along) {
    case Along::kNone:
      return x;
    case Along::kSoftmax:
      return x.softmax(-1);
    case Along::kCumsum:
      return x.cumsum(-1);
    case Along::kSort:
      return std::get<0>(at::sort(x, -1));
    case Along::kFlip:
      return x.flip({-1});
    case Along::kExchangedHalves: {
      const std::vector<at::Tensor> halves = x.chunk(2, -1);
      return at::cat({halves.at(1), halves.at(0)}, -1);
    }
    case Along::kStandardised:
      return (x - x.mean(-1, true)) / (x.var(-1, /*unbiased=*/false, /*keepdim=*/true) + 1).sqrt();
    case Along::kBelowLargest:
      return x - x.amax(-1, true);
  }
  return x;
}

}  // namespace

Mlp::Mlp(const ModelSpec& spec) : spec_(spec.feed) {
  const std::int64_t dim = spec.dim();
  const auto into = [&](const char* name, std::int64_t out) {
    Layer made = linear_layer(spec_.linear, dim, out, spec_.bias);
    register_module(name, made.module);
    return made;
  };
  if (spec_.inner_bias) {
    inner_bias_ = register_slot("inner_bias", {spec_.inner});
  }
  if (spec_.kind == MlpKind::kExperts) {
    const auto act = [this](const at::Tensor& x) { return between(activate(x)); };
    experts_ = register_module("experts", std::make_shared<Experts>(dim, spec_.inner, act));
    return;
  }
  if (spec_.kind == MlpKind::kFusedWeight) {
    fused_ = into("gate_up_proj", 2 * spec_.inner);
  } else {
    up_ = into("up_proj", spec_.inner);
  }
  if (spec_.kind == MlpKind::kGated || spec_.kind == MlpKind::kGatedFusedKernel) {
    gate_ = into("gate_proj", spec_.inner);
  }
  if (spec_.middle_norm != NormKind::kNone) {
    middle_norm_ = norm_layer(spec_.middle_norm, spec_.inner);
    register_module("middle_norm", middle_norm_.module);
  }
  if (spec_.dropout != DropoutKind::kNone) {
    dropout_ = dropout_layer(spec_.dropout);
    register_module("dropout", dropout_.module);
  }
  down_ = projection(spec_.linear, spec_.inner, dim, spec_.bias, spec_.adapter);
  register_module("down_proj", down_.module);
}

at::Tensor Mlp::activate(const at::Tensor& x) {
  switch (spec_.activation) {
    case Activation::kGelu:
      return at::gelu(x);
    case Activation::kRelu:
      return at::relu(x);
    case Activation::kCentred:
      return x - x.mean(-1, /*keepdim=*/true);
    case Activation::kComposite:
      return call_operator("fuzz::composite", x);
    case Activation::kKernelOfAten:
      return call_operator("fuzz::kernel_of_aten", x);
    case Activation::kWithAutograd:
      return call_operator("fuzz::with_autograd", x);
    case Activation::kWithoutRule:
      return call_operator("fuzz::without_rule", x);
    case Activation::kRandomMultiply:
      return is_training() ? x * at::rand_like(x) : x;
  }
  return x;
}

at::Tensor Mlp::inner(const at::Tensor& x) {
  switch (spec_.kind) {
    case MlpKind::kPlain:
      return activate(up_(x));
    case MlpKind::kGated:
      return activate(gate_(x)) * up_(x);
    case MlpKind::kGatedFusedKernel:
      return nn::silu_mul(gate_(x), up_(x));
    case MlpKind::kFusedWeight: {
      const std::vector<at::Tensor> halves = fused_(x).chunk(2, -1);
      return activate(halves.at(0)) * halves.at(1);
    }
    case MlpKind::kExperts:
      break;
  }
  return x;
}

at::Tensor Mlp::between(const at::Tensor& x) const {
  const at::Tensor y = apply_along(spec_.along, x);
  return inner_bias_.defined() ? y + *inner_bias_ : y;
}

std::vector<at::Tensor> Mlp::forward(const at::Tensor& x) {
  std::vector<at::Tensor> results;
  if (experts_ != nullptr) {
    results = (*experts_)(x);
    results.resize(spec_.auxiliary_loss ? 2 : 1);
    return results;
  }
  const at::Tensor h = between(inner(x));
  results.push_back(down_(dropout_(middle_norm_(h))));
  if (spec_.auxiliary_loss) {
    results.push_back(h.square().mean(-1).sum());
  }
  return results;
}

}  // namespace tessera::fuzz
