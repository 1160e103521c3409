#pragma once

#include <vector>

#include "group_info.h"

namespace tessera::comm {

/// The ranks of a group, host by host. Hosts and ranks are numbered as in the group.
struct HostLayout {
  explicit HostLayout(const GroupInfo& group);

  int hosts() const { return static_cast<int>(first.size()) - 1; }
  int count(int of) const { return at(first, of + 1) - at(first, of); }
  /// The group's rank of the first rank of a host, which talks to the other hosts.
  int leader(int of) const { return at(order, at(first, of)); }
  int first_here() const { return at(first, host); }
  int count_here() const { return count(host); }
  /// Whether all hosts have equally many ranks.
  bool even() const;
  /// Whether the group has its ranks host by host.
  bool in_order() const;

  std::vector<int> order;  ///< the group's ranks, host by host
  std::vector<int> first;  ///< of each host, its first place in `order`; then their number
  int host = 0;            ///< of this rank
  int local = 0;           ///< this rank's number among those of its host

 private:
  static int at(const std::vector<int>& numbers, int index) {
    return numbers[static_cast<std::size_t>(index)];
  }
};

}  // namespace tessera::comm
