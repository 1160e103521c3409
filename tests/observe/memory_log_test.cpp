// Whose the memory of a step is.
#include "tessera/observe/memory_log.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <string>

namespace tessera::observe {
namespace {

std::int64_t most(const UnitMemory& unit, MemoryKind kind) {
  return unit.most[static_cast<std::size_t>(kind)];
}

TEST(MemoryLog, KnowsAUnitByWhatALaneBeganForAndAModuleByItsName) {
  MemoryLog log(TensorMemoryOptions{});
  const comm::StreamsPtr lanes = log.memory_lanes(comm::make_streams(c10::kCPU));
  log.begin_step([] { return std::string(); });
  lanes->begin_unit(comm::Lane::kAllGather, "unit 'a'");
  lanes->note("all_gather unit 'b'");  // a mark, whose text means nothing
  at::Tensor gathered;
  {
    const comm::LaneScope lane(*lanes, comm::Lane::kAllGather);
    gathered = at::empty({100});
  }
  log.entered(Activity::kForward, "the root unit");  // a module of that name
  const at::Tensor result = at::empty({10});
  log.left();
  const StepMemory memory =
      log.use(/*on_host=*/false, [](const std::string& module) { return "unit of " + module; });
  EXPECT_EQ(most(memory.units.at("unit 'a'"), MemoryKind::kGathered), 400);
  EXPECT_EQ(most(memory.units.at("unit of the root unit"), MemoryKind::kActivations), 40);
  EXPECT_FALSE(memory.units.contains("unit 'b'"));
  EXPECT_FALSE(memory.units.contains("the root unit"));
}

}  // namespace
}  // namespace tessera::observe
