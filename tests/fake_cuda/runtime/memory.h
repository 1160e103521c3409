// Which memory belongs to devices, and which of the host's is pinned.
#pragma once

#include <cstddef>

namespace fake_cuda {

enum class MemoryKind { kPageable, kPinned, kDevice };

/// The kind of memory that holds `address`.
MemoryKind kind_of(const void* address);

/// How many bytes there are from `address` to the end of its memory; 0 for pageable memory.
std::size_t bytes_from(const void* address);

/// The device of device memory.
int device_of(const void* address);

}  // namespace fake_cuda
