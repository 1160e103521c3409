#include "tessera/dtensor/communication_scope.h"

#include <fmt/format.h>

namespace tessera {

CommunicationScope::CommunicationScope(const DeviceMesh& mesh)
    : world_(mesh.world()), before_(world_->traffic().table()) {}

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

}  // namespace tessera
