// Which memory belongs to devices, and which of the host's is pinned.
#pragma once

#include <cstddef>

namespace fake_cuda {

enum class MemoryKind { kPageable, kPinned, kDevice };

/// The kind of memory that holds `address`.
MemoryKind kind_of(const void* address);

/// The device of device memory.
int device_of(const void* address);

}  // namespace fake_cuda
