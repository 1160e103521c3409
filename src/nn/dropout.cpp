#include "tessera/nn/dropout.h"

#include "tessera/core/error.h"
#include "tessera/nn/functional.h"
#include "tessera/nn/initialization.h"

namespace tessera::nn {

Dropout::Dropout(double p) : p_(p) {
  TESSERA_CHECK(p >= 0.0 && p < 1.0, "dropout with probability ", p,
                " was asked for; it must be in [0, 1)");
}

at::Tensor Dropout::forward(const at::Tensor& x) {
  if (!is_training() || p_ == 0.0) return x;
  return nn::dropout(x, p_, {key_.seed, substream(key_.stream, replayed_count(calls_))});
}

void Dropout::reset_parameters(const InitContext& init) {
  key_ = init.key();
  calls_ = 0;
}

}  // namespace tessera::nn
