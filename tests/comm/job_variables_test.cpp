#include "host/host.h"

#include <map>
#include <tuple>

#include "testing/errors.h"

namespace tessera::comm {
namespace {

using Map = std::map<std::string, std::string>;

JobVariables read(const Map& map) {
  return read_job_variables([&](const std::string& name) -> std::optional<std::string> {
    const auto entry = map.find(name);
    return entry == map.end() ? std::nullopt : std::optional(entry->second);
  });
}

Map with(Map map, const Map& changes) {
  for (const auto& [name, value] : changes) {
    map[name] = value;
  }
  return map;
}

const Map kTorchrun = {{"RANK", "3"},
                       {"WORLD_SIZE", "8"},
                       {"LOCAL_RANK", "1"},
                       {"MASTER_ADDR", "a"},
                       {"MASTER_PORT", "1234"}};

/// A job's rank, world size, local rank, store address and store port.
using Place = std::tuple<int, int, int, std::string, int>;

Place place_of(const Map& map) {
  const JobVariables job = read(map);
  return {job.rank, job.size, job.local_rank.value_or(-1), job.address, job.port};
}

TEST(JobVariables, AreReadFromTorchrunSlurmAndOpenMpi) {
  EXPECT_EQ(read({}).rank, 0);
  EXPECT_EQ(read({}).size, 1);
  EXPECT_EQ(place_of(kTorchrun), Place(3, 8, 1, "a", 1234));
  EXPECT_FALSE(read(kTorchrun).agent_store);
  EXPECT_TRUE(read(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).agent_store);
  EXPECT_EQ(read(with(kTorchrun, {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}})).size, 8);
  const Map slurm = {{"SLURM_PROCID", "5"},
                     {"SLURM_STEP_NUM_TASKS", "6"},
                     {"SLURM_LOCALID", "2"},
                     {"SLURM_JOB_ID", "70123"},
                     {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1"}};
  EXPECT_EQ(place_of(slurm), Place(5, 6, 2, "10.0.0.1", 20123));
  EXPECT_EQ(read(slurm).launcher, "SLURM_PROCID and SLURM_STEP_NUM_TASKS of Slurm");
  EXPECT_EQ(place_of(with(slurm, {{"MASTER_ADDR", "node7"}, {"MASTER_PORT", "99"}})),
            Place(5, 6, 2, "node7", 99));
  const JobVariables mpi = read({{"OMPI_COMM_WORLD_RANK", "1"},
                                 {"OMPI_COMM_WORLD_SIZE", "2"},
                                 {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                 {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  EXPECT_EQ(mpi.rank, 1);
  EXPECT_EQ(mpi.size, 2);
  EXPECT_EQ(mpi.address, "127.0.0.1");
}

TEST(JobVariables, SlurmAllocationWithoutATaskHasOneRank) {
  EXPECT_EQ(read({{"SLURM_NTASKS", "4"}}).size, 1);
  // A Slurm batch script has SLURM_PROCID, too, but only processes that srun starts are ranks.
  EXPECT_EQ(read({{"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}}).size, 1);
}

TEST(JobVariables, KeyPrefixDependsOnJobTokenAndRestartCount) {
  const auto prefix = [](const Map& more) { return read(with(kTorchrun, more)).key_prefix; };
  EXPECT_NE(prefix({{"TESSERA_JOB_TOKEN", "ab"}}), prefix({{"TESSERA_JOB_TOKEN", "cd"}}));
  EXPECT_NE(prefix({{"TORCHELASTIC_RESTART_COUNT", "1"}}), prefix({}));
}

TEST(JobVariables, TimeoutsAreInSeconds) {
  EXPECT_EQ(read({{"TESSERA_TIMEOUT", "2"}}).timeout->count() / 10, 200);
  for (const std::string bad : {"soon", "-1", "0", "2e6"}) {
    EXPECT_ERROR(read({{"TESSERA_TIMEOUT", bad}}), "TESSERA_TIMEOUT=" + bad);
  }
  EXPECT_EQ(read({{"TESSERA_WATCHDOG", "0.5"}}).watchdog->count(), 500);
  EXPECT_EQ(read({{"TESSERA_WATCHDOG", "0"}}).watchdog->count(), 0);
  EXPECT_FALSE(read({}).watchdog);
  EXPECT_ERROR(read({{"TESSERA_WATCHDOG", "-1"}}), "TESSERA_WATCHDOG=-1", "1000000");
  // If the time-out is short, the watchdog reports after half of the time-out.
  EXPECT_EQ(read({{"TESSERA_TIMEOUT", "20"}}).watchdog->count(), 10'000);
  EXPECT_EQ(read({{"TESSERA_TIMEOUT", "20"}, {"TESSERA_WATCHDOG", "3"}}).watchdog->count(), 3000);
  EXPECT_FALSE(read({{"TESSERA_TIMEOUT", "600"}}).watchdog);
}

TEST(JobVariables, RefusesMalformedContradictoryAndMissingValues) {
  for (const char* bad : {"x", "-1", "3x", "1.5", "99999999999"}) {
    EXPECT_ERROR(read(with(kTorchrun, {{"RANK", bad}})), std::string("RANK=") + bad);
  }
  const auto reading = [](const Map& changes) { return [=] { read(with(kTorchrun, changes)); }; };
  testing::expect_refusals(
      {{"size", reading({{"WORLD_SIZE", "0"}}), {"WORLD_SIZE=0"}},
       {"port", reading({{"MASTER_PORT", "70000"}}), {"MASTER_PORT=70000", "65535"}},
       {"rank", reading({{"RANK", "8"}, {"LOCAL_RANK", "0"}}), {"RANK=8", "WORLD_SIZE=8"}},
       {"local", reading({{"LOCAL_RANK", "4"}}), {"LOCAL_RANK=4", "RANK=3"}},
       {"no size", [] { read({{"RANK", "0"}}); }, {"RANK", "WORLD_SIZE is not"}},
       {"no rank", [] { read({{"WORLD_SIZE", "2"}}); }, {"WORLD_SIZE", "RANK is not"}},
       {"no address",
        [] { read({{"RANK", "0"}, {"WORLD_SIZE", "2"}}); },
        {"MASTER_ADDR is not set"}}});
}

}  // namespace
}  // namespace tessera::comm
