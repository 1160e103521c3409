#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// A block of host memory that a tensor allocates or frees.
struct TensorBlock {
  std::uint64_t number = 0;  ///< of the allocation in this process, from 1
  std::int64_t bytes = 0;
  bool freed = false;
  const void* data = nullptr;
};

/// How tensors' memory is counted.
struct TensorMemoryOptions {
  /// Addresses without memory behind them, until something is written there: for FakeMode.
  bool reserve_only = false;
  /// Each block counts as a multiple of this many bytes: 512 for what libtorch does on a GPU.
  std::int64_t granularity = 1;
  /// Called for each block, on the thread that allocates or frees it; may be empty.
  std::function<void(const TensorBlock&)> observer{};
};

/// From now on counts the memory of tensors on the host, of the whole process; what was allocated
/// before is not. A later call changes the options. Not while other threads use tensors.
void count_tensor_memory(TensorMemoryOptions options = {});
/// Bytes of the blocks that are there; nullopt if nothing is counted.
std::optional<std::int64_t> tensor_bytes();
/// The most since the last call; nullopt if nothing is counted. Thread safe.
std::optional<std::int64_t> take_peak_tensor_bytes();

}  // namespace tessera::observe
TESSERA_API_END
