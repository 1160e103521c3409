// A program's view of its collectives. The world counts all of them, with or without a scope: the
// decorator around every group does (comm/checked/). So a scope is the difference between two
// readings of the same table; only the list of single calls is recorded for it.

#include "tessera/dtensor/communication_scope.h"

#include <fmt/format.h>

namespace tessera {

CommunicationScope::CommunicationScope(const DeviceMesh& mesh)
    : world_(mesh.world()), before_(world_->traffic().table()), recorder_(world_->traffic()) {}

comm::TrafficTable CommunicationScope::table() const {
  return world_->traffic().since(before_);
}

comm::Traffic CommunicationScope::total() const {
  return comm::total(table());
}

comm::Traffic CommunicationScope::total(const std::string& mesh_dim) const {
  return comm::total(table(), mesh_dim);
}

std::string CommunicationScope::report() const {
  std::string text =
      fmt::format("{:12} {:16} {:>8} {:>14}\n", "dimension", "collective", "calls", "bytes");
  for (const auto& [key, traffic] : table()) {
    text += fmt::format("{:12} {:16} {:>8} {:>14}\n", key.first, key.second, traffic.calls,
                        traffic.bytes);
  }
  return text;
}

std::string CommunicationScope::listing() const {
  std::string text = fmt::format("{:>6} {:12} {:16} {:>14} {}\n", "call", "dimension", "collective",
                                 "bytes", "for");
  int number = 0;
  for (const auto& call : calls()) {
    text += fmt::format("{:>6} {:12} {:16} {:>14} {}\n", ++number, call.group, call.collective,
                        call.bytes, call.purpose);
  }
  return text;
}

}  // namespace tessera
