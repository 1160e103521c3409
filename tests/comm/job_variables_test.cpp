#include "job_variables.h"

#include <gtest/gtest.h>

#include <map>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using Map = std::map<std::string, std::string>;

JobVariables read(const Map& map) {
  return read_job_variables([&](const std::string& name) -> std::optional<std::string> {
    const auto entry = map.find(name);
    return entry == map.end() ? std::nullopt : std::optional(entry->second);
  });
}

/// The message of the Error for `map`, or "" if there is none.
std::string error_of(const Map& map) {
  try {
    read(map);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
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
                                 {"SLURM_NTASKS", "6"},
                                 {"SLURM_LOCALID", "2"},
                                 {"SLURM_JOB_ID", "70123"},
                                 {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1"}});
  EXPECT_EQ(job.rank, 5);
  EXPECT_EQ(job.size, 6);
  EXPECT_EQ(job.local_rank, 2);
  EXPECT_EQ(job.address, "10.0.0.1");
  EXPECT_EQ(job.port, 20123);
}

TEST(JobVariables, MasterAddrOverridesSlurms) {
  const Map slurm = {{"SLURM_PROCID", "0"},
                     {"SLURM_NTASKS", "2"},
                     {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1"},
                     {"MASTER_ADDR", "node7"},
                     {"MASTER_PORT", "99"}};
  EXPECT_EQ(read(slurm).address, "node7");
  EXPECT_EQ(read(slurm).port, 99);
}

TEST(JobVariables, ASlurmAllocationWithoutATaskIsAWorldOfOne) {
  EXPECT_EQ(read({{"SLURM_NTASKS", "4"}}).size, 1);
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
  EXPECT_EQ(read(with(kTorchrun, {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}})).size, 8);
}

TEST(JobVariables, TheTokenAndTheRestartKeepJobsApart) {
  const auto prefix = [](const Map& more) { return read(with(kTorchrun, more)).key_prefix; };
  EXPECT_NE(prefix({{"TESSERA_JOB_TOKEN", "ab"}}), prefix({{"TESSERA_JOB_TOKEN", "cd"}}));
  EXPECT_NE(prefix({{"TORCHELASTIC_RESTART_COUNT", "1"}}), prefix({}));
}

TEST(JobVariables, TimeoutIsInSeconds) {
  EXPECT_EQ(read({{"TESSERA_TIMEOUT_S", "2"}}).timeout->count() / 10, 200);
  EXPECT_NE(error_of({{"TESSERA_TIMEOUT_S", "soon"}}), "");
  EXPECT_NE(error_of({{"TESSERA_TIMEOUT_S", "-1"}}), "");
}

TEST(JobVariables, NamesTheMalformedValue) {
  for (const char* bad : {"x", "-1", "3x", "1.5", "99999999999"}) {
    const std::string error = error_of(with(kTorchrun, {{"RANK", bad}}));
    EXPECT_NE(error.find(std::string("RANK=") + bad), std::string::npos) << error;
  }
  EXPECT_NE(error_of(with(kTorchrun, {{"WORLD_SIZE", "0"}})), "");
  EXPECT_NE(error_of(with(kTorchrun, {{"MASTER_PORT", "70000"}})), "");
}

TEST(JobVariables, RefusesARankOutsideTheWorld) {
  EXPECT_NE(error_of(with(kTorchrun, {{"RANK", "8"}, {"LOCAL_RANK", "0"}})).find("contradicts"),
            std::string::npos);
}

TEST(JobVariables, RefusesALocalRankAboveTheRank) {
  EXPECT_NE(error_of(with(kTorchrun, {{"LOCAL_RANK", "4"}})), "");
}

TEST(JobVariables, RefusesHalfASet) {
  EXPECT_NE(error_of({{"RANK", "0"}}).find("WORLD_SIZE"), std::string::npos);
  EXPECT_NE(error_of({{"WORLD_SIZE", "2"}}).find("RANK"), std::string::npos);
  EXPECT_NE(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}}).find("MASTER_ADDR"), std::string::npos);
}

}  // namespace
}  // namespace tessera::comm
