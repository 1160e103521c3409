// Conversions to c10d's arguments for Gloo and NCCL, and the reduction that Gloo lacks.

#pragma once

#include <ATen/core/Tensor.h>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/core/placement.h"
#include "tessera/export.h"
#include "tessera/internals/detail/c10d.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// The operator of c10d for `op`. NCCL implements all operators, Gloo all except the average.
detail::GroupReduceOp to_c10d(ReduceOp op);

/// Converts counts of elements to counts of bytes.
std::vector<std::int64_t> counts_in_bytes(std::span<const std::int64_t> counts,
                                          std::size_t item_bytes);

/// A view of the elements of `contiguous` as bytes, (numel * itemsize), for collectives that only
/// move data.
at::Tensor as_bytes(const at::Tensor& contiguous);

/// Sets `output`, (n), to the reduction of the rows of `parts`, (ranks, n), in rank order. 16-bit
/// floats are accumulated in fp32.
void reduce_rows(const at::Tensor& output, const at::Tensor& parts, ReduceOp op);

}  // namespace tessera::comm
TESSERA_API_END

namespace tessera::comm {

/// A second group of the ranks of a group, for data on the hosts. The second group is made at its
/// first use, because most groups never need a second group.
class LazyHostGroup {
 public:
  using Make = std::function<CommunicatorPtr()>;

  /// `make` makes the second group. It is collective.
  explicit LazyHostGroup(Make make) : make_(std::move(make)) {}

  /// The second group. Collective at the first call. Throws what `make` throws.
  Communicator& get();
  /// Makes ranks that wait in the second group fail. Thread safe.
  void abort();

 private:
  Make make_;
  // Protects `made_` in get() against an abort() from another thread.
  std::mutex mutex_;
  CommunicatorPtr made_;
  std::atomic<bool> failed_{false};
};

}  // namespace tessera::comm
