#include "host/host.h"

#include <gtest/gtest.h>

#include <map>

#include "tessera/core/error.h"
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

TEST(JobVariables, NoneIsAWorldOfOne) {
  const JobVariables job = read({});
  EXPECT_EQ(job.rank, 0);
  EXPECT_EQ(job.size, 1);
}

TEST(JobVariables, ReadsTorchruns) {
  const JobVariables job = read(kTorchrun);
  EXPECT_EQ(job.rank, 3);
  EXPECT_EQ(job.size, 8);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.address, "a");
  EXPECT_EQ(job.port, 1234);
  EXPECT_FALSE(job.agent_store);
}

TEST(JobVariables, TorchrunsAgentServesTheStore) {
  EXPECT_TRUE(read(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).agent_store);
}

TEST(JobVariables, ReadsSlurms) {
  const JobVariables job = read({{"SLURM_PROCID", "5"},
                                 {"SLURM_STEP_NUM_TASKS", "6"},
                                 {"SLURM_LOCALID", "2"},
                                 {"SLURM_JOB_ID", "70123"},
                                 {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1"}});
  EXPECT_EQ(job.rank, 5);
  EXPECT_EQ(job.size, 6);
  EXPECT_EQ(job.local_rank, 2);
  EXPECT_EQ(job.address, "10.0.0.1");
  EXPECT_EQ(job.port, 20123);
  EXPECT_EQ(job.launcher, "SLURM_PROCID and SLURM_STEP_NUM_TASKS of Slurm");
}

TEST(JobVariables, MasterAddrOverridesSlurms) {
  const Map slurm = {{"SLURM_PROCID", "0"},
                     {"SLURM_STEP_NUM_TASKS", "2"},
                     {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1"},
                     {"MASTER_ADDR", "node7"},
                     {"MASTER_PORT", "99"}};
  EXPECT_EQ(read(slurm).address, "node7");
  EXPECT_EQ(read(slurm).port, 99);
}

TEST(JobVariables, ASlurmAllocationWithoutATaskIsAWorldOfOne) {
  EXPECT_EQ(read({{"SLURM_NTASKS", "4"}}).size, 1);
  // A batch script has them too; srun's step alone has ranks.
  EXPECT_EQ(read({{"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}}).size, 1);
}

TEST(JobVariables, ReadsOpenMpis) {
  const JobVariables job = read({{"OMPI_COMM_WORLD_RANK", "1"},
                                 {"OMPI_COMM_WORLD_SIZE", "2"},
                                 {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                 {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  EXPECT_EQ(job.rank, 1);
  EXPECT_EQ(job.size, 2);
  EXPECT_EQ(job.address, "127.0.0.1");
}

TEST(JobVariables, TorchrunsWinOverSlurms) {
  EXPECT_EQ(read(with(kTorchrun, {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}})).size, 8);
}

TEST(JobVariables, TheTokenAndTheRestartKeepJobsApart) {
  const auto prefix = [](const Map& more) { return read(with(kTorchrun, more)).key_prefix; };
  EXPECT_NE(prefix({{"TESSERA_JOB_TOKEN", "ab"}}), prefix({{"TESSERA_JOB_TOKEN", "cd"}}));
  EXPECT_NE(prefix({{"TORCHELASTIC_RESTART_COUNT", "1"}}), prefix({}));
}

TEST(JobVariables, TimeoutIsInSeconds) {
  EXPECT_EQ(read({{"TESSERA_TIMEOUT", "2"}}).timeout->count() / 10, 200);
  EXPECT_ERROR(read({{"TESSERA_TIMEOUT", "soon"}}), "TESSERA_TIMEOUT=soon");
  EXPECT_ERROR(read({{"TESSERA_TIMEOUT", "-1"}}), "TESSERA_TIMEOUT=-1");
  EXPECT_ERROR(read({{"TESSERA_TIMEOUT", "0"}}), "TESSERA_TIMEOUT=0", "above 0");
  EXPECT_ERROR(read({{"TESSERA_TIMEOUT", "2e6"}}), "TESSERA_TIMEOUT=2e6", "above 0 to 1000000");
}

TEST(JobVariables, TheWatchdogsLimitIsInSecondsAndMayBeZero) {
  EXPECT_EQ(read({{"TESSERA_WATCHDOG", "0.5"}}).watchdog->count(), 500);
  EXPECT_EQ(read({{"TESSERA_WATCHDOG", "0"}}).watchdog->count(), 0);
  EXPECT_FALSE(read({}).watchdog);
  EXPECT_ERROR(read({{"TESSERA_WATCHDOG", "-1"}}), "TESSERA_WATCHDOG=-1", "from 0 to 1000000");
}

TEST(JobVariables, AShortTimeOutIsReportedAfterHalfOfIt) {
  EXPECT_EQ(read({{"TESSERA_TIMEOUT", "20"}}).watchdog->count(), 10'000);
  EXPECT_EQ(read({{"TESSERA_TIMEOUT", "20"}, {"TESSERA_WATCHDOG", "3"}}).watchdog->count(), 3000);
  EXPECT_FALSE(read({{"TESSERA_TIMEOUT", "600"}}).watchdog);
}

TEST(JobVariables, NamesTheMalformedValue) {
  for (const char* bad : {"x", "-1", "3x", "1.5", "99999999999"}) {
    EXPECT_ERROR(read(with(kTorchrun, {{"RANK", bad}})), std::string("RANK=") + bad);
  }
  EXPECT_ERROR(read(with(kTorchrun, {{"WORLD_SIZE", "0"}})), "WORLD_SIZE=0: not an integer from 1");
  EXPECT_ERROR(read(with(kTorchrun, {{"MASTER_PORT", "70000"}})), "MASTER_PORT=70000", "65535");
}

TEST(JobVariables, RefusesARankOutsideTheWorld) {
  EXPECT_ERROR(read(with(kTorchrun, {{"RANK", "8"}, {"LOCAL_RANK", "0"}})),
               "RANK=8 contradicts WORLD_SIZE=8");
}

TEST(JobVariables, RefusesALocalRankAboveTheRank) {
  EXPECT_ERROR(read(with(kTorchrun, {{"LOCAL_RANK", "4"}})), "LOCAL_RANK=4 contradicts RANK=3");
}

TEST(JobVariables, RefusesHalfASet) {
  EXPECT_ERROR(read({{"RANK", "0"}}), "RANK is set, but WORLD_SIZE is not");
  EXPECT_ERROR(read({{"WORLD_SIZE", "2"}}), "WORLD_SIZE is set, but RANK is not");
  EXPECT_ERROR(read({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), "MASTER_ADDR is not set");
}

}  // namespace
}  // namespace tessera::comm
