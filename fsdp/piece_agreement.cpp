#include "piece_agreement.h"

#include <algorithm>
#include <cstdint>

namespace tessera::fsdp {

void drop_invalid_pieces(std::vector<ParameterGroup*> groups) {
  while (!groups.empty()) {
    const DeviceMesh mesh = groups.front()->mesh().shard;
    const auto others = std::stable_partition(
        groups.begin(), groups.end(),
        [&](const ParameterGroup* group) { return group->mesh().shard == mesh; });
    const std::vector<ParameterGroup*> same(groups.begin(), others);
    groups.erase(groups.begin(), others);
    std::vector<std::uint8_t> invalid;
    for (const ParameterGroup* group : same) {
      invalid.push_back(group->has_valid_piece() ? 0 : 1);
    }
    const comm::PurposeScope purpose(mesh.group(), "the pieces kept for a step");
    mesh.group().any_rank(invalid);
    for (std::size_t i = 0; i < same.size(); ++i) {
      if (invalid[i] != 0) {
        same[i]->drop_piece();
      }
    }
  }
}

}  // namespace tessera::fsdp
