// What a node of autograd's graph keeps of a tensor: without a cycle where it is the node's own
// result, with the check that it was not written to since, and packed by hooks.
// torch::autograd::Function keeps tensors so in a list that grows with each call; the library's
// nodes (graph_node.h) have them as members.
//
// To 2.12 unpack() takes the node as shared_ptr, from 2.13 as intrusive_ptr: pointer_to() of
// graph_node.h gives either.
//
// Canary: SavedTensorCanary.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

using torch::autograd::SavedVariable;

/// How one tensor is kept instead; see engine.h for whose they are.
using torch::autograd::SavedVariableHooks;

/// Whether hooks take what nodes that this thread makes now would keep.
bool hooks_keep_tensors();

}  // namespace tessera::detail
TESSERA_API_END
