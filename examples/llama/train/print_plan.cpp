// Makes a step of the run in a fake world, and prints its calls: those that each rank of the run
// will make.

#include "examples/llama/train/print_plan.h"

#include <iostream>
#include <optional>
#include <vector>

#include "examples/llama/train/run.h"
#include "tessera/comm/fake_world.h"
#include "tessera/kernels/fake_mode.h"
#include "tessera/observe/memory.h"
#include "tessera/observe/run_record.h"
#include "tessera/tensor_parallel/plan_table.h"

namespace llama {

using namespace tessera;

namespace {

/// A plan, and how FSDP then shards what tensor parallelism leaves.
struct PrintedPlan {
  tensor_parallel::PlanTable table;
  std::vector<observe::ShardingRow> sharding;
};

PrintedPlan plan_of(const TrainOptions& options) {
  observe::count_tensor_memory({.reserve_only = true});
  const kernels::FakeMode fake;
  std::optional<tensor_parallel::PlanRecording> recording;
  const ApplyPlan apply = [&](nn::ModuleBase& model, const DeviceMesh& mesh,
                              const tensor_parallel::ParallelizePlan& plan) {
    recording.emplace(model, mesh, plan);
  };
  const planning::Run run = planned_run(
      planned(options), comm::fake_world(/*rank=*/0, static_cast<int>(options.ranks())), apply);
  run.step();  // the first one makes the optimizer's state, too
  return {recording->record(run.step), observe::sharding_table(*run.model)};
}

std::int64_t bytes_of(const std::vector<observe::ShardingRow>& rows) {
  std::int64_t bytes = 0;
  for (const observe::ShardingRow& row : rows) {
    bytes += row.local_bytes;
  }
  return bytes;
}

}  // namespace

void print_plan(const TrainOptions& options, const comm::World& world) {
  if (world.rank() != 0) {
    return;
  }
  const PrintedPlan plan = plan_of(options);
  if (options.print_plan == "json") {
    std::cout << to_json(plan.table) << std::endl;
    return;
  }
  std::cout << plan.table << "with FSDP rank 0 holds " << bytes_of(plan.sharding)
            << " bytes of these parameters" << std::endl;
}

}  // namespace llama
