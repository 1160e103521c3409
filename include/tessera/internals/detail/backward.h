// The running backward, and hooks on gradients.
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

// What is known of the backward that this thread runs. libtorch's public functions begin one, and
// say nothing within it.
//
// No version differs, except in the pointer type of nodes.
//
// Canary: RunningBackwardCanary.

/// One number for each backward of the process; -1 outside of any.
int backward_id();
/// Whether the graph stays, so that another backward may go through it (retain_graph).
bool keeps_graph();

/// The name of the node that runs: libtorch's, or "T" for a torch::autograd::Function T. Empty
/// where this thread runs none.
std::string running_node();
/// The thread that made it, as at::RecordFunction::currentThreadId() counts.
std::optional<std::uint64_t> origin_of_running_node();

/// Whether this thread's backward runs the node, earlier or later.
bool is_in_backward(const torch::autograd::Node* node);

/// Runs at the end of this thread's backward, after what was queued before; may queue in turn.
/// Throws outside of a backward.
void queue_end_of_backward(std::function<void()> callback);

// Tells the library's hooks on gradients from those of the program, and reads the hooks of a
// tensor, to call or to move them. libtorch keeps both kinds in one private list of functions. In a
// backward it tells which node runs, but not whether the code is the node's formula or a hook. A
// node is the program's if torch::autograd::Function makes it, in C++ or Python (the library's own
// included), or if its class is neither libtorch's nor the library's.
//
// No version differs. A hook is recognised as a C++ hook by its class's mangled name: libtorch does
// not export what dynamic_cast needs.
//
// Canary: GradientHooksCanary.

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
  kFormulaOrProgram,  ///< the node is the program's, or has its hooks
};

/// What runs on this thread.
BackwardCode backward_code();

/// Whether a node has hooks that are not the library's.
bool has_hooks_of_program(torch::autograd::Node& node);

/// Whether it ever had one by Tensor::register_hook: one that was taken away leaves its place.
bool has_hooks(const at::Tensor& leaf);
/// What its hooks make of `gradient`, one after another.
at::Tensor call_hooks(const at::Tensor& leaf, const at::Tensor& gradient);
/// The hook for a gradient that has been added to `.grad`, as optimizers within backward have it.
/// Does nothing where there is none.
void call_hook_after_grad(const at::Tensor& leaf);

/// `to` has the hooks of `from` as well. Their list is shared, so that hooks which the program
/// takes away by the old tensor go here too. `from` must require a gradient.
void move_hooks(const at::Tensor& from, const at::Tensor& to);

}  // namespace tessera::detail
TESSERA_API_END
