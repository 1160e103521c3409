// Functions that describe the backward that runs on this thread, and hooks on gradients.
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

// The backward that runs on this thread. libtorch's public functions start a backward, but do not
// describe a running one.
//
// Canary: RunningBackwardCanary.

/// The number of the backward that runs on this thread, different for each backward of the process;
/// -1 outside of a backward.
int backward_id();
/// Whether the running backward keeps its graph for another backward (retain_graph).
bool keeps_graph();

/// The name of the autograd node that runs on this thread: libtorch's name, or "T" for a
/// torch::autograd::Function T. Empty if no node runs.
std::string running_node();
/// The thread that made the autograd node that runs on this thread. Threads are numbered as by
/// at::RecordFunction::currentThreadId(). nullopt if no node runs.
std::optional<std::uint64_t> origin_of_running_node();

/// Whether this thread's backward has run or will run the node.
bool is_in_backward(const torch::autograd::Node* node);

/// Queues a function to run at the end of this thread's backward, in the order of queueing. The
/// function may queue further functions. Throws outside of a backward.
void queue_end_of_backward(std::function<void()> callback);

// Distinguishes the library's hooks on gradients from those of the program, and calls or moves the
// hooks of a tensor. libtorch has both kinds in one private list of functions. During a backward
// libtorch tells which node runs, but not whether the formula of the node or one of its hooks runs.
// A node belongs to the program if torch::autograd::Function made it, in C++ or Python (also in
// this library), or if its class is neither libtorch's nor this library's.
//
// A hook is recognised as a C++ hook by its class's mangled name: libtorch does not export what
// dynamic_cast needs.
//
// Canary: GradientHooksCanary.

enum class OwnHook : std::uint8_t {
  kLayout,     ///< a hook that redistributes a gradient to the layout of its leaf
  kMakePlain,  ///< a hook that makes the gradient of a plain tensor plain and complete
  kNotice,  ///< a hook that observes that backward has reached the tensor, or observes its gradient
};

/// Like Tensor::register_hook, but marks the hook as the library's.
void add_own_hook(const at::Tensor& tensor, OwnHook what,
                  std::function<at::Tensor(const at::Tensor&)> hook);

/// Whether the hook was added to `tensor` itself, not to an alias.
bool has_own_hook(const at::Tensor& tensor, OwnHook what);

enum class BackwardCode : std::uint8_t {
  kNone,              ///< no code of a backward: this thread runs no backward
  kFormula,           ///< a gradient formula of libtorch or of this library
  kFormulaOrProgram,  ///< possibly code of the program: the node is the program's, or has hooks of
                      ///< the program
};

/// The kind of code that runs on this thread.
BackwardCode backward_code();

/// Whether a node of autograd's graph has hooks that were not added by this library.
bool has_hooks_of_program(torch::autograd::Node& node);

/// Whether Tensor::register_hook was ever called on `leaf`. The result stays true if the hook is
/// removed.
bool has_hooks(const at::Tensor& leaf);
/// Runs the hooks of `leaf` one after another on `gradient` and returns the result.
at::Tensor call_hooks(const at::Tensor& leaf, const at::Tensor& gradient);
/// Calls the post-accumulate-grad hook of `leaf`, which runs after a gradient was added to `.grad`;
/// optimizers that step in backward use it. Does nothing if `leaf` has no such hook.
void call_hook_after_grad(const at::Tensor& leaf);

/// Adds the hooks of `from` to `to`. Both tensors then share one list of hooks, so a hook that the
/// program removes from `from` is also removed from `to`. `from` must require a gradient.
void move_hooks(const at::Tensor& from, const at::Tensor& to);

}  // namespace tessera::detail
TESSERA_API_END
