// The MLPs between attentions.

#include "tessera/nn/mlp.h"

#include <ATen/ops/gelu.h>

#include <vector>

#include "blocks/fill_linears.h"
#include "tessera/core/error.h"
#include "tessera/nn/functional.h"

namespace tessera::nn {
namespace {

const MlpOptions& checked_mlp(const MlpOptions& options) {
  TESSERA_CHECK(options.hidden > 0 && options.inner > 0, "an MLP of ", options.hidden,
                " features and ", options.inner, " within was asked for; both must be 1 or more");
  return options;
}

}  // namespace

SwiGlu::SwiGlu(const MlpOptions& options) : options_(checked_mlp(options)) {
  const LinearOptions bias{.bias = options.bias};
  const auto linear = [&](const std::string& name, std::int64_t in, std::int64_t out) {
    return register_module(name, std::make_shared<Linear>(in, out, bias));
  };
  const MlpNames& names = options.names;
  gate_ = linear(names.gate, options.hidden, options.inner);
  up_ = linear(names.up, options.hidden, options.inner);
  down_ = linear(names.down, options.inner, options.hidden);
}

at::Tensor SwiGlu::forward(const at::Tensor& x) {
  check_called();
  const std::vector<at::Tensor> gate_up = linear_products(x, {*gate_, *up_});
  // One kernel for the activation and the product: the activation's result is not saved.
  return (*down_)(silu_mul(gate_up[0], gate_up[1]));
}

void SwiGlu::reset_parameters(const InitContext& init) {
  detail::fill_linears(init, {gate_.get(), up_.get()}, *down_, options_.init_std,
                       options_.output_init_std);
}

GeluMlp::GeluMlp(const MlpOptions& options, bool tanh)
    : options_(checked_mlp(options)), tanh_(tanh) {
  const LinearOptions bias{.bias = options.bias};
  up_ = register_module(options.names.up,
                        std::make_shared<Linear>(options.hidden, options.inner, bias));
  down_ = register_module(options.names.down,
                          std::make_shared<Linear>(options.inner, options.hidden, bias));
}

at::Tensor GeluMlp::forward(const at::Tensor& x) {
  check_called();
  return (*down_)(at::gelu((*up_)(x), tanh_ ? "tanh" : "none"));
}

void GeluMlp::reset_parameters(const InitContext& init) {
  detail::fill_linears(init, {up_.get()}, *down_, options_.init_std, options_.output_init_std);
}

}  // namespace tessera::nn
