#include "tessera/internals/detail/refused_gradient.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

namespace tessera::detail {

torch::CppFunction refuse_gradient() {
  return torch::autograd::autogradNotImplementedFallback();
}

}  // namespace tessera::detail
