#include "gloo/link_bytes.h"

namespace tessera::comm {
namespace {

bool is_on_other_host(const GroupInfo& group, int rank) {
  return !group.hosts.empty() && group.hosts[static_cast<std::size_t>(rank)] !=
                                     group.hosts[static_cast<std::size_t>(group.rank)];
}

/// The bytes of a ring that go to another host: all that this rank sends, or none.
std::int64_t ring_link_bytes(const GroupInfo& group, std::int64_t bytes) {
  return is_on_other_host(group, (group.rank + 1) % group.size()) ? bytes : 0;
}

}  // namespace

bool gloo_reduces(at::ScalarType type, ReduceOp op) {
  switch (type) {
    case at::kFloat:
    case at::kDouble:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return true;
    case at::kHalf:
    case at::kBFloat16:
      // Gloo rounds after every term; the sum and the product are ours, in fp32.
      return op == ReduceOp::kMax || op == ReduceOp::kMin;
    default:
      return false;
  }
}

std::int64_t all_gather_link_bytes(const GroupInfo& group, std::int64_t bytes) {
  return ring_link_bytes(group, (group.size() - 1) * bytes);
}

std::int64_t all_reduce_link_bytes(const GroupInfo& group, const at::Tensor& tensor, ReduceOp op) {
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  return gloo_reduces(tensor.scalar_type(), op)
             ? ring_link_bytes(group, 2 * (group.size() - 1) * bytes / group.size())
             : all_gather_link_bytes(group, bytes);
}

std::int64_t all_to_all_link_bytes(const GroupInfo& group, std::span<const std::int64_t> bytes) {
  std::int64_t sum = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    sum += is_on_other_host(group, rank) ? bytes[static_cast<std::size_t>(rank)] : 0;
  }
  return sum;
}

std::int64_t broadcast_link_bytes(const GroupInfo& group, std::int64_t bytes, int root) {
  // Ranks count from the root. In each round those that have the data send it as far ahead as there
  // are such ranks.
  const int own = (group.rank + group.size() - root) % group.size();
  std::int64_t sum = 0;
  for (int have = 1; have < group.size(); have *= 2) {
    const int to = own + have;
    if (own < have && to < group.size()) {
      sum += is_on_other_host(group, (to + root) % group.size()) ? bytes : 0;
    }
  }
  return sum;
}

}  // namespace tessera::comm
