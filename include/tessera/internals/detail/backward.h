// Functions that describe the backward that runs on this thread, and functions for gradient hooks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "tessera/export.h"

namespace torch::autograd {
struct Node;
}

TESSERA_API_BEGIN
namespace tessera::detail {

// Functions that describe the backward that runs on this thread. libtorch's public functions only
// start a backward.
//
// Canary: RunningBackwardCanary, a test of libtorch itself.

/// Returns an id of the backward that runs on this thread, different for each backward of the
/// process; -1 outside of a backward.
int backward_id();
/// Whether the backward that runs on this thread has retain_graph, so that its graph is kept.
bool keeps_graph();

/// Returns the name of the autograd node that runs on this thread ("MmBackward0"), or "T" for a
/// torch::autograd::Function T. Returns "" if no node runs.
std::string running_node();
/// Returns the id of the thread whose forward made the autograd node that runs on this thread
/// (at::RecordFunction::currentThreadId()); nullopt if no node runs.
std::optional<std::uint64_t> origin_of_running_node();

/// Whether the backward that runs on this thread executes the given autograd node.
bool is_in_backward(const torch::autograd::Node* node);

/// Queues a function to run at the end of the backward on this thread, after functions that were
/// queued earlier. Throws outside of a backward.
void queue_end_of_backward(std::function<void()> callback);

// Functions that find, call and copy a tensor's gradient hooks. libtorch has only a private list,
// with hooks of the program and of Tessera.
//
// A node belongs to the program if the node's class is a torch::autograd::Function, or is defined
// outside of libtorch and Tessera. C++ hooks are recognised by the mangled name of the class,
// because libtorch does not export the type information for dynamic_cast.
//
// Canary: GradientHooksCanary, a test of libtorch itself.

enum class OwnHook : std::uint8_t {
  kLayout,     ///< a hook that redistributes a gradient to the layout of its leaf
  kMakePlain,  ///< a hook that gathers and reduces the gradient of a plain tensor
  kNotice,     ///< a hook that observes a gradient and returns the gradient unchanged
};

/// Like Tensor::register_hook, but marks the hook as a hook of this library.
void add_own_hook(const at::Tensor& tensor, OwnHook what,
                  std::function<at::Tensor(const at::Tensor&)> hook);

/// Whether the tensor has a hook of kind `what`. Hooks of an alias (alias_tensor()) do not count.
bool has_own_hook(const at::Tensor& tensor, OwnHook what);

enum class BackwardCode : std::uint8_t {
  kNone,              ///< no backward runs on this thread
  kFormula,           ///< a gradient formula of libtorch or of this library
  kFormulaOrProgram,  ///< a node of the program, or a node that has hooks of the program
};

/// Returns what the backward on this thread runs now: a gradient formula or code of the program.
BackwardCode backward_code();

/// Whether a node of autograd's graph has hooks that were not added by this library.
bool has_hooks_of_program(torch::autograd::Node& node);

/// Whether a hook was ever registered on `leaf`, even if the hook was removed later.
bool has_hooks(const at::Tensor& leaf);
/// Runs the hooks of `leaf` one after another on `gradient` and returns the result.
at::Tensor call_hooks(const at::Tensor& leaf, const at::Tensor& gradient);
/// Calls the post-accumulate-grad hook of `leaf`, if there is one.
void call_hook_after_grad(const at::Tensor& leaf);

/// Makes both tensors share the hooks of `from`, so that a later removal from `from` also applies
/// to `to`. `from` must require a gradient.
void move_hooks(const at::Tensor& from, const at::Tensor& to);

}  // namespace tessera::detail
TESSERA_API_END
