// What a collective of Gloo's sends over the network between hosts: arithmetic, from the algorithms
// that Gloo 0.5 and libtorch's ProcessGroupGloo use.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "group_info.h"
#include "tessera/core/placement.h"

namespace tessera::comm {

/// Whether libtorch's Gloo implements this all-reduce. Others are an all-gather and a local sum.
bool gloo_reduces(at::ScalarType type, ReduceOp op);

// The bytes that rank `group.rank` sends to ranks on other hosts, without headers. `bytes`: of its
// input.

/// A ring: every block but the next rank's goes to the next rank.
std::int64_t all_gather_link_bytes(const GroupInfo& group, std::int64_t bytes);
/// A ring of reduce-scatter and all-gather, or one all-gather.
std::int64_t all_reduce_link_bytes(const GroupInfo& group, const at::Tensor& tensor, ReduceOp op);
/// From rank to rank. `bytes`: to each rank.
std::int64_t all_to_all_link_bytes(const GroupInfo& group, std::span<const std::int64_t> bytes);
/// A binomial tree.
std::int64_t broadcast_link_bytes(const GroupInfo& group, std::int64_t bytes, int root);

}  // namespace tessera::comm
