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
/// One of each rank of a group.
using Ranges = std::vector<Range>;

inline Range overlap(const Range& a, const Range& b) {
  const auto begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

/// What the ranks that split `tensor_dim`, of `size` positions, have of it, in the order of their
/// group. The dimension has one digit.
Ranges parts_along(const Layout& layout, int tensor_dim, std::int64_t size);

/// The positions that the busiest rank sends to others so that, of ranks that have `from`, each has
/// its `to`.
std::int64_t most_sent(const Ranges& from, const Ranges& to);

/// `local` has the positions from[rank] along `dim`; the result has to[rank], each position the sum
/// of what all ranks have of it, 0 where none has it. Collective over `group`, one all-to-all, if
/// most_sent() isn't 0. A meta tensor moves no data. May return `local`. Below autograd.
at::Tensor exchange_along(const at::Tensor& local, std::int64_t dim, const Ranges& from,
                          const Ranges& to, comm::Communicator& group);

}  // namespace tessera::detail
