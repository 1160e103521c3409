#include "neighbour_shard.h"

#include <string>
#include <utility>
#include <vector>

namespace tessera::fsdp {

NeighbourShard::NeighbourShard(const DeviceMesh& mesh, std::int64_t count)
    : mesh_(mesh), count_(count) {}

comm::Communicator& NeighbourShard::group() {
  if (group_ == nullptr) {
    const std::int64_t first = mesh_.local_rank() / count_ * count_;
    const auto begin = mesh_.ranks().begin() + first;
    const std::string& name = mesh_.shape().names().empty() ? "dp" : mesh_.shape().names().front();
    group_ = mesh_.world()->group(std::vector<int>(begin, begin + count_),
                                  name + "/" + std::to_string(count_));
  }
  return *group_;
}

void NeighbourShard::keep(const at::Tensor& memory) {
  const std::int64_t piece = memory.numel() / count_;
  piece_ = memory.narrow(0, mesh_.local_rank() % count_ * piece, piece).clone();
}

comm::WorkPtr NeighbourShard::start_gather(const at::Tensor& memory, const std::string& label) {
  sent_ = std::exchange(piece_, {});
  const comm::PurposeScope purpose(group(), label);
  return group().all_gather(memory, sent_);
}

}  // namespace tessera::fsdp
