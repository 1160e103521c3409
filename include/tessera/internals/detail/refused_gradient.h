// A kernel of autograd for an operator that has no gradient: a backward that comes to it throws,
// and a tensor that does not need one passes. In Python an operator without a formula gets it; in
// C++ it is a function that libtorch exports without documentation.
//
// No version differs.
//
// Canary: RefusedGradientCanary.
#pragma once

#include <torch/library.h>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

torch::CppFunction refuse_gradient();

}  // namespace tessera::detail
TESSERA_API_END
