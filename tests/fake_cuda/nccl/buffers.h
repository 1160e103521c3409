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

/// Bytes of each rank's part, if this is no multiple of 16: the parts of most ranks then begin
/// where NCCL moves single bytes. Else 0.
std::size_t bytes_of_unaligned_parts(const Operation& operation);

}  // namespace fake_cuda
