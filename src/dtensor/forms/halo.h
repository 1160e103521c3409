#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/core/layout.h"

namespace tessera::detail {

/// Positions along a dimension, from `begin` up to `end`.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
  friend bool operator==(const Range&, const Range&) = default;
};
/// One range for each rank of a group.
using Ranges = std::vector<Range>;

inline Range overlap(const Range& a, const Range& b) {
  const auto begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

/// The range of `tensor_dim`, of `size` positions, that each rank of the group that shards it
/// holds, in the order of the group. The dimension must have one digit.
Ranges shard_ranges(const Layout& layout, int tensor_dim, std::int64_t size);

/// The largest number of positions that one rank sends to others when ranks that hold ranges `from`
/// get ranges `to`.
std::int64_t most_sent(const Ranges& from, const Ranges& to);

/// A halo exchange. `local` has positions from[rank] along `dim`, the result has to[rank]. Each of
/// its positions is the sum over all ranks that hold it, 0 if none does: so the same exchange
/// brings halos forward and adds up their gradients backward. Collective over `group`, one
/// all-to-all, if most_sent() isn't 0. A meta tensor moves no data. May return `local`. Below
/// autograd.
at::Tensor exchange_along(const at::Tensor& local, std::int64_t dim, const Ranges& from,
                          const Ranges& to, comm::Communicator& group);

}  // namespace tessera::detail
