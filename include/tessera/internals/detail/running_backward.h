// What is known of the backward that this thread runs. libtorch's public functions begin one, and
// say nothing within it.
//
// No version differs, but in how a node is held (graph_node.h).
//
// Canary: RunningBackwardCanary.
#pragma once

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

}  // namespace tessera::detail
TESSERA_API_END
