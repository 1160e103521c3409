#pragma once

#include <torch/library.h>

/// Puts operators of our own in the place of composite ones, wherever such an operator may arrive:
/// above autograd, and below it. `implement(library)` names them.
#define TESSERA_OVERRIDE_COMPOSITE(implement)       \
  TORCH_LIBRARY_IMPL(aten, Fake, library) {         \
    implement(library);                             \
  }                                                 \
  TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) {  \
    implement(library);                             \
  }                                                 \
  TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { \
    implement(library);                             \
  }
