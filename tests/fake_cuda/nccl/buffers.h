// What NCCL may not be given.
#pragma once

#include "nccl/operation.h"

namespace fake_cuda {

/// False, and a violation, for buffers that are not the device's, that reach past their memory,
/// that overlap otherwise than in place, or that are not aligned to their elements. NCCL would read
/// or write what it must not.
bool check_buffers(const Operation& operation);

/// Whether NCCL can move the buffers by 16 bytes at a time. By single bytes it is many times
/// slower.
bool is_aligned(const Operation& operation);

}  // namespace fake_cuda
