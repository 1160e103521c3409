#include "tessera/observe/step_trace.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/activation_checkpointing.h"
#include "tessera/nn/initialization.h"
#include "tessera/observe/module_watch.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/files.h"
#include "testing/module_values.h"
#include "testing/small_llama.h"

namespace tessera::observe {
namespace {

using nlohmann::json;
using testing::SmallLlama;
using testing::TemporaryFolder;

std::shared_ptr<SmallLlama> sharded_llama(const DeviceMesh& mesh, bool checkpointed) {
  const auto model = testing::made_on_meta<SmallLlama>();
  if (mesh.size("tp") > 1) {
    tensor_parallel::parallelize_module(*model, mesh["tp"], testing::plan_of_small_llama(true));
  }
  if (checkpointed) {
    nn::apply_activation_checkpointing(*model, {.select = nn::of_class<testing::LlamaBlock>()});
  }
  for (const auto& block : model->blocks) {
    fsdp::fully_shard(*block, mesh["dp"]);
  }
  fsdp::fully_shard(*model, mesh["dp"]);
  nn::to_empty(*model, at::kCPU);
  nn::init_weights(*model, 0);
  return model;
}

void train_step(SmallLlama& model) {
  const at::Tensor tokens = at::arange(24).remainder(13);
  tensor_parallel::cross_entropy(model(tokens), tokens.add(1).remainder(13)).backward();
  RECORD_USER_SCOPE("after backward");
}

/// What ranks of dp x tp did in step 2 of two, and by rank what their world counted of it.
struct Traced {
  json events;
  std::map<int, comm::TrafficTable> counted;
};
Traced trace_step(int dp, int tp, bool checkpointed = false) {
  const TemporaryFolder folder;
  Traced traced;
  std::mutex mutex;
  RunRanks(dp * tp, [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({dp, tp}, {"dp", "tp"});
    const auto model = sharded_llama(mesh, checkpointed);
    ModuleWatch watch(*model);
    StepTrace trace(mesh.world());
    watch.add(trace);
    train_step(*model);
    const comm::TrafficTable before = mesh.world()->traffic().table();
    {
      const ModuleWatch::Scope scope(watch);
      trace.begin_step(2);
      train_step(*model);
      trace.end_step();
    }
    const comm::TrafficTable step = mesh.world()->traffic().since(before);
    trace.write(folder / "trace.json", "here");
    const std::lock_guard lock(mutex);
    traced.counted[rank.rank()] = step;
  });
  std::ifstream in(folder / "trace.json");
  traced.events = json::parse(in).at("traceEvents");
  return traced;
}

/// The slices of a category of one rank, in order of their beginning.
std::vector<json> slices(const json& events, const std::string& category, int rank) {
  std::vector<json> found;
  for (const json& event : events) {
    if (event.at("ph") == "X" && event.at("cat") == category && event.at("pid") == rank) {
      found.push_back(event);
    }
  }
  std::ranges::stable_sort(found, {},
                           [](const json& event) { return event.at("ts").get<double>(); });
  return found;
}

std::vector<std::string> names(const std::vector<json>& slices) {
  std::vector<std::string> list;
  for (const json& slice : slices) {
    list.push_back(slice.at("name"));
  }
  return list;
}

std::ptrdiff_t place_of(const std::vector<json>& slices, const std::string& name) {
  const std::vector<std::string> all = names(slices);
  const auto found = std::ranges::find(all, name);
  EXPECT_NE(found, all.end()) << name;
  return found - all.begin();
}

TEST(StepTrace, SumsAreThoseOfTheCounters) {
  const Traced traced = trace_step(2, 2);
  for (int rank = 0; rank < 4; ++rank) {
    comm::TrafficTable sums;
    for (const json& call : slices(traced.events, "collective", rank)) {
      const json& args = call.at("args");
      comm::Traffic& entry = sums[{args.at("mesh_dimension"), args.at("collective")}];
      ++entry.calls;
      entry.bytes += args.at("bytes").get<std::int64_t>();
      EXPECT_GE(args.at("exposed_us").get<double>(), call.at("dur").get<double>());
      EXPECT_EQ(args.at("step"), 2);
    }
    const comm::TrafficTable& counted = traced.counted.at(rank);
    ASSERT_EQ(sums.size(), counted.size());
    for (const auto& [key, traffic] : counted) {
      EXPECT_EQ(sums[key].calls, traffic.calls) << key.first << " " << key.second;
      EXPECT_EQ(sums[key].bytes, traffic.bytes) << key.first << " " << key.second;
    }
  }
}

TEST(StepTrace, CollectivesSayTheirUnit) {
  const Traced traced = trace_step(2, 1);
  bool found = false;
  for (const json& call : slices(traced.events, "collective", 1)) {
    found = found || call.at("args").at("purpose").get<std::string>().find("unit 'block0'") !=
                         std::string::npos;
  }
  EXPECT_TRUE(found);
  EXPECT_FALSE(slices(traced.events, "wait", 1).empty());
}

TEST(StepTrace, ShowsModulesForwardAndBackward) {
  const Traced traced = trace_step(2, 2);
  const std::vector<json> forward = slices(traced.events, "forward", 3);
  EXPECT_EQ(names(forward).front(), "tessera::testing::SmallLlama");
  EXPECT_LT(place_of(forward, "block0"), place_of(forward, "block0.mixer.q"));
  EXPECT_LT(place_of(forward, "block0.mixer.q"), place_of(forward, "block1"));
  const std::vector<json> backward = slices(traced.events, "backward", 3);
  EXPECT_LT(place_of(backward, "head"), place_of(backward, "block1"));
  EXPECT_LT(place_of(backward, "block1"), place_of(backward, "block1.mlp.down"));
  EXPECT_LT(place_of(backward, "block1.mlp.down"), place_of(backward, "block1.mlp.up"));
  EXPECT_LT(place_of(backward, "block1.mixer.o"), place_of(backward, "block0"));
  place_of(backward, "embed");
  EXPECT_EQ(names(slices(traced.events, "scope", 3)), std::vector<std::string>{"after backward"});
  EXPECT_EQ(names(slices(traced.events, "step", 3)), std::vector<std::string>{"step 2"});
}

TEST(StepTrace, SlicesOfAThreadAreNested) {
  const Traced traced = trace_step(2, 1);
  std::map<int, std::vector<json>> threads;
  for (const char* category : {"step", "forward", "backward", "scope"}) {
    for (const json& slice : slices(traced.events, category, 0)) {
      threads[slice.at("tid")].push_back(slice);
    }
  }
  const auto begin = [](const json& slice) { return slice.at("ts").get<double>(); };
  const auto end = [&](const json& slice) { return begin(slice) + slice.at("dur").get<double>(); };
  constexpr double kRounding = 1e-2;  // microseconds
  for (auto& [thread, all] : threads) {
    std::ranges::stable_sort(all, {}, begin);
    std::vector<json> open;
    for (const json& slice : all) {
      EXPECT_GE(slice.at("dur").get<double>(), 0);
      while (!open.empty() && end(open.back()) <= begin(slice) + kRounding) {
        open.pop_back();
      }
      EXPECT_TRUE(open.empty() || end(slice) <= end(open.back()) + kRounding)
          << slice << " in " << open.back();
      open.push_back(slice);
    }
  }
}

TEST(StepTrace, ShowsWhatIsComputedAgain) {
  const Traced traced = trace_step(1, 1, /*checkpointed=*/true);
  EXPECT_GE(place_of(slices(traced.events, "recomputation", 0), "block1.mlp.gate"), 0);
  EXPECT_GE(place_of(slices(traced.events, "backward", 0), "block1.mlp.gate"), 0);
  EXPECT_TRUE(slices(trace_step(1, 1).events, "recomputation", 0).empty());
}

}  // namespace
}  // namespace tessera::observe
