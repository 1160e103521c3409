#include "neighbour_shard.h"

namespace tessera::fsdp {

void NeighbourShard::keep(const at::Tensor& memory) {
  const std::int64_t piece = memory.numel() / count();
  piece_ = memory.narrow(0, mesh_.local_rank() * piece, piece).clone();
}

comm::WorkPtr NeighbourShard::start_gather(const at::Tensor& memory, const std::string& label) {
  sent_ = piece_;
  const comm::PurposeScope purpose(group(), label);
  return group().all_gather(memory, sent_);
}

}  // namespace tessera::fsdp
