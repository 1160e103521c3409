// Calls before and after a node of autograd's graph runs. Public are hooks on tensors, which run
// before the node that made one, and see no other end of it; those on nodes are Python's alone.
//
// No version differs.
//
// Canary: NodeHooksCanary.
#pragma once

#include <functional>

#include "tessera/export.h"
#include "tessera/internals/detail/graph_node.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// Both run on the thread on which the node does; gradients pass as they are.
void watch_node(Node& node, std::function<void()> before, std::function<void()> after);

}  // namespace tessera::detail
TESSERA_API_END
