#include "race/checked_rank.h"

#include <utility>

#include "fsdp/param_group.h"
#include "fsdp/unit.h"
#include "race/checked_world.h"

namespace tessera::race {

CheckedRank::CheckedRank(const Rank& rank, Site left_out, Costs costs)
    : rank_(rank),
      checker_(std::make_shared<RaceChecker>(costs)),
      streams_(std::make_shared<CheckedStreams>(*checker_, std::move(left_out))),
      world_(checked_world(rank.world(), *checker_)),
      operators_(std::make_unique<OperatorWatch>(*checker_)),
      allocations_(checker_) {}

CheckedRank::~CheckedRank() {
  checker_->stop();
}

DeviceMesh CheckedRank::mesh(std::vector<std::int64_t> sizes,
                             std::vector<std::string> names) const {
  return init_device_mesh(world_, std::move(sizes), std::move(names));
}

void CheckedRank::watch(const nn::ModuleBase& root) {
  root.attached<fsdp::Unit>()->parameters().set_comm_context(
      std::make_shared<fsdp::CommContext>(streams_, at::kCPU));
}

}  // namespace tessera::race
