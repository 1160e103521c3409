#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "tessera/comm/communicator.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::fsdp {

// What a unit may call in place of the communicator's collectives (collectives.h).

/// Gathers a unit's packed parameters: output (ranks, n) = all ranks' inputs (n), in the type of
/// computation, or bytes where a parameter has an all-gather extension. Collective over `group`.
/// May return nullptr if it is done; otherwise the unit waits for what it returns.
using AllGather = std::function<comm::WorkPtr(comm::Communicator& group, const at::Tensor& output,
                                              const at::Tensor& input)>;
/// Sums a unit's packed gradients: output (n) = row `rank` of the sum of all ranks' inputs
/// (ranks, n), in reduce_dtype. Collective over `group`. May return nullptr if it is done.
using ReduceScatter = std::function<comm::WorkPtr(
    comm::Communicator& group, const at::Tensor& output, const at::Tensor& input)>;
/// A flat tensor of `numel` elements, not initialised, of the type and on the device that `options`
/// name: what a unit sends or receives over `group`.
using AllocateBuffer = std::function<at::Tensor(comm::Communicator& group, std::int64_t numel,
                                                const c10::TensorOptions& options)>;
/// Changes a unit's reduced gradients in place, before they are divided: all of a type together,
/// flat, in reduce_dtype; on one rank, where nothing is reduced, one by one. Under HSDP they have
/// been all-reduced. To reduce them further, over a group of the caller's own. It is called where
/// the reduction runs: the next unit's waits for it.
using AllReduceHook = std::function<void(const at::Tensor& gradients)>;

}  // namespace tessera::fsdp
TESSERA_API_END
