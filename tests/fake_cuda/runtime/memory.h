// Which memory belongs to devices, and which of the host's is pinned.
#pragma once

#include <cstddef>

namespace fake_cuda {

enum class MemoryKind { kPageable, kPinned, kDevice };

/// The kind of memory that holds `address`.
MemoryKind kind_of(const void* address);

/// How many bytes there are from `address` to the end of its memory; 0 for pageable memory.
std::size_t bytes_from(const void* address);

/// Where the fake itself reads and writes what a program knows as `address`: another address for
/// device memory, which the host may not touch at its own; else the same.
void* view_of(const void* address);
template <class T>
T* view_of(T* address) {
  return static_cast<T*>(view_of(static_cast<const void*>(address)));
}

/// The device of device memory.
int device_of(const void* address);

}  // namespace fake_cuda
