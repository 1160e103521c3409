// Hooks on gradients that are the library's own, told from those of the program. libtorch keeps
// both in one list of functions, and says of the code that runs in a backward only for which node
// it runs: not whether it is the node's formula or a hook. Of nodes those are the program's that
// torch::autograd::Function makes, in C++ or Python, the library's own among them, and those of
// classes of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace tessera::detail {

enum class OwnHook : std::uint8_t {
  kLayout,     ///< brings a gradient to its leaf's layout
  kMakePlain,  ///< makes a plain tensor's gradient plain and whole
  kNotice,     ///< notes that backward has come there, or what came
};

/// As Tensor::register_hook.
void add_own_hook(const at::Tensor& tensor, OwnHook what,
                  std::function<at::Tensor(const at::Tensor&)> hook);

/// Whether it was added to `tensor` itself; not for an alias of it.
bool has_own_hook(const at::Tensor& tensor, OwnHook what);

enum class BackwardCode : std::uint8_t {
  kNone,              ///< this thread runs no backward
  kFormula,           ///< autograd's, or the library's
  kFormulaOrProgram,  ///< of a node that has hooks of the program, or is of its own
};

/// What runs on this thread.
BackwardCode backward_code();

}  // namespace tessera::detail
