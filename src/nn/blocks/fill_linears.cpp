#include "blocks/fill_linears.h"

namespace tessera::nn::detail {

void fill_linears(const InitContext& init, std::initializer_list<const Linear*> in,
                  const Linear& out, double std, double out_std) {
  const auto fill = [&](const Linear& linear, double own_std) {
    init.fill(linear.weight, init::normal(0, own_std));
    if (linear.bias.defined()) {
      init.fill(linear.bias, init::zeros());
    }
  };
  for (const Linear* linear : in) {
    if (linear != nullptr) {
      fill(*linear, std);
    }
  }
  fill(out, out_std > 0 ? out_std : std);
}

}  // namespace tessera::nn::detail
