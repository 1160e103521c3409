#include "hierarchy/host_layout.h"

#include <algorithm>

namespace tessera::comm {

HostLayout::HostLayout(const GroupInfo& group) {
  const int hosts = group.hosts.empty() ? 1 : *std::ranges::max_element(group.hosts) + 1;
  for (int each = 0; each < hosts; ++each) {
    first.push_back(static_cast<int>(order.size()));
    for (int rank = 0; rank < group.size(); ++rank) {
      if (!group.hosts.empty() && at(group.hosts, rank) != each) {
        continue;
      }
      if (rank == group.rank) {
        host = each;
        local = static_cast<int>(order.size()) - first.back();
      }
      order.push_back(rank);
    }
  }
  first.push_back(group.size());
}

bool HostLayout::even() const {
  return hosts() * count_here() == first.back() &&
         std::ranges::adjacent_find(
             first, [step = count_here()](int a, int b) { return b - a != step; }) == first.end();
}

bool HostLayout::in_order() const {
  return std::ranges::is_sorted(order);
}

}  // namespace tessera::comm
