#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string_view>
#include <vector>

#include "tessera/mesh/device_mesh.h"

namespace tessera::detail {

/// Whether a flag is set on one rank of the mesh at least. Collective over all of it.
bool any_rank(const DeviceMesh& mesh, bool own);

/// Whether ranks compare what they make: as TESSERA_DEBUG says, else in builds without NDEBUG.
bool checks_agreement();

/// Whether TESSERA_DEBUG asks for checks that cost collectives in the middle of a step. Read when a
/// thread first asks.
bool checks_calls();

/// Runs `work`, which must not communicate. If it throws on a rank of the mesh, every rank throws
/// an Error with the message of the first such rank. `what`: the work's name in it. Collective.
void run_or_fail_together(const DeviceMesh& mesh, std::string_view what,
                          const std::function<void()>& work);

/// Throws Error, on every rank, unless `tensors`, plain ones that operator `what` takes, hold the
/// same values on all ranks of the mesh. Collective.
void check_replicated(const DeviceMesh& mesh, std::string_view what,
                      const std::vector<at::Tensor>& tensors);

}  // namespace tessera::detail
