#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string_view>
#include <vector>

#include "tessera/mesh/device_mesh.h"

namespace tessera::detail {

/// Whether ranks compare each new distributed tensor. The variable TESSERA_DEBUG decides; without
/// the variable, ranks compare only in builds without NDEBUG.
bool checks_agreement();

/// Whether TESSERA_DEBUG enables checks that need collectives in the middle of a step. Each thread
/// reads the variable once.
bool checks_calls();

/// Runs `work`, which must not communicate. If it throws on one rank of the mesh, every rank throws
/// an Error with the message of the first such rank. `what`: the name of the work in the message.
/// Collective.
void run_or_fail_together(const DeviceMesh& mesh, std::string_view what,
                          const std::function<void()>& work);

/// Throws Error, on every rank, unless `tensors`, the plain arguments of operator `what`, have the
/// same values on all ranks of the mesh. Collective.
void check_replicated(const DeviceMesh& mesh, std::string_view what,
                      const std::vector<at::Tensor>& tensors);

}  // namespace tessera::detail
