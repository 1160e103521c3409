#pragma once

namespace tessera::nn::detail {

/// Makes autograd ask the innermost region of a thread how to keep tensors for backward; once for
/// the process. Throws Error if another autograd engine than libtorch's own is installed (Python
/// brings one): replacing it would break its users.
void install_engine();

}  // namespace tessera::nn::detail
