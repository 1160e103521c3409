#include <fmt/format.h>
#include <fmt/ranges.h>

#include <iterator>
#include <map>
#include <mutex>

#include "fsdp/training/training.h"
#include "race/checked_world.h"
#include "tessera/comm/detail/scopes.h"
#include "tessera/nn/functional.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/optim/muon.h"
#include "tessera/optim/optimizer.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/small_llama.h"

namespace tessera::race {
namespace {

/// Step 1 has no recorded order for prefetching. Step 2 is the first that waits for the optimizer
/// of the step before. Later steps run like step 3.
constexpr int kSteps = 3;

/// A training program for `ranks` ranks. The checker must find no races.
struct Scenario {
  std::string name;
  int ranks;
  std::function<void(CheckedRank&)> train;
};

[[maybe_unused]] void PrintTo(const Scenario& scenario, std::ostream* out) {
  *out << scenario.name;
}

/// The races and the waits that the checkers of all ranks recorded in a training program.
struct Findings {
  std::vector<std::string> faults;
  std::set<Site> sites;  ///< `sites`: names of all waits
};

using fsdp::Options;
using fsdp::ShardedModel;
using fsdp::SmallModel;

std::optional<Placement> last_dim(const std::string&, const at::Tensor& tensor) {
  return Shard{tensor.dim() - 1};
}

void update(optim::AdamW& optimizer) {
  optim::clip_grad_norm_(optimizer.parameters(), 0.5);
  optimizer.step();
  optimizer.zero_grad();
}

void train(CheckedRank& rank, SmallModel& model, int micro_batches = 1,
           const std::function<void(int)>& between = {}) {
  optim::AdamW optimizer(model, {});
  for (int step = 0; step < kSteps; ++step) {
    for (int part = 0; part < micro_batches; ++part) {
      if (between) {
        between(part);
      }
      fsdp::local_loss(model, rank.rank(), step + part).backward();
    }
    update(optimizer);
  }
}

/// Returns a Scenario with a small model. `prepare` changes the model before training.
std::function<void(CheckedRank&)> training(std::vector<std::int64_t> sizes,
                                           const Options& options = {},
                                           const std::function<void(SmallModel&)>& prepare = {},
                                           int micro_batches = 1,
                                           const fsdp::Sizes& model_sizes = {}) {
  return [=](CheckedRank& rank) {
    std::vector<std::string> names{"dp"};
    if (sizes.size() == 2) {
      names = {"dp_replicate", "dp"};
    }
    ShardedModel model(rank.mesh(sizes, names), options, model_sizes);
    rank.watch(model);
    if (prepare) {
      prepare(model);
    }
    train(rank, model, micro_batches);
  };
}

struct WatchedModel : ShardedModel {
  explicit WatchedModel(CheckedRank& rank) : ShardedModel(rank.mesh({2}, {"dp"})) {
    rank.watch(*this);
  }
};

void accumulate(CheckedRank& rank) {
  WatchedModel model(rank);
  train(rank, model, 2, [&](int part) {
    fsdp::set_requires_gradient_sync(model, part == 1);
    fsdp::set_is_last_backward(model, part == 1);
  });
}

void overlap_micro_batches(CheckedRank& rank) {
  WatchedModel model(rank);
  train(rank, model, 2, [&](int part) { fsdp::set_is_last_backward(model, part == 1); });
}

void gather_by_hand(CheckedRank& rank) {
  WatchedModel model(rank);
  train(rank, model, 1, [&](int) {
    const c10::AutoGradMode no_grad(false);
    fsdp::start_unshard(*model.blocks[0]).wait();
    (*model.blocks[0])(uniform_values({2, fsdp::kDim}, 1));
    fsdp::reshard(*model.blocks[0]);
    const fsdp::UnshardScope unsharded(*model.blocks[1]);
    fsdp::start_unshard(*model.blocks[2]);
    fsdp::reshard(*model.blocks[2]);
  });
}

void follow_an_event(CheckedRank& rank) {
  WatchedModel model(rank);
  optim::AdamW optimizer(model, {});
  for (int step = 0; step < kSteps; ++step) {
    fsdp::local_loss(model, rank.rank(), step).backward();
    // In this scenario, the optimizer runs on the reduce-scatter stream.
    rank.streams().order(comm::Lane::kCompute, comm::Lane::kReduceScatter);
    {
      const comm::LaneScope lane(rank.streams(), comm::Lane::kReduceScatter);
      update(optimizer);
    }
    fsdp::set_post_optim_event(model, rank.streams().record(comm::Lane::kReduceScatter));
  }
}

struct LlamaTraining {
  fsdp::Options options{};
  bool recomputes = false, has_adapters = false, by_muon = false, scales = false;
};

void shard(testing::SmallLlama& model, const DeviceMesh& mesh, const LlamaTraining& how) {
  if (how.has_adapters) {
    nn::apply_lora(model, {.rank = 2, .targets = {"block*.mixer.[qv]", "block*.mlp.down"}});
  }
  testing::fill(model);
  tensor_parallel::parallelize_module(model, mesh["tp"], testing::plan_of_small_llama(true));
  if (how.recomputes) {
    nn::apply_activation_checkpointing(model, nn::of_class<testing::LlamaBlock>());
  }
  for (const auto& block : model.blocks) {
    fsdp::fully_shard(*block, mesh["dp"], how.options);
  }
  fsdp::fully_shard(model, mesh["dp"], how.options);
}

std::unique_ptr<optim::Optimizer> optimizer_of(const nn::ModuleBase& model, bool by_muon) {
  if (!by_muon) {
    return std::make_unique<optim::AdamW>(model, optim::AdamWOptions{});
  }
  const optim::MuonSplit split = optim::split_for_muon(model, {"head.weight"});
  return std::make_unique<optim::OptimizerList>(std::vector<std::shared_ptr<optim::Optimizer>>{
      std::make_shared<optim::Muon>(split.matrices, optim::MuonOptions{}),
      std::make_shared<optim::AdamW>(split.rest, optim::AdamWOptions{})});
}

std::function<void(CheckedRank&)> llama_training(const LlamaTraining& how) {
  return [how](CheckedRank& rank) {
    const testing::SmallLlamaConfig config{};
    testing::SmallLlama model(config);
    shard(model, rank.mesh({2, 2}, {"dp", "tp"}), how);
    rank.watch(model);
    const auto optimizer = optimizer_of(model, how.by_muon);
    optim::GradScaler scaler({.enabled = how.scales});
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor ids = at::arange(13, at::kLong).add(step).remainder(config.vocabulary);
      scaler
          .scale(tensor_parallel::cross_entropy(model(ids.narrow(0, 0, 12)), ids.narrow(0, 1, 12)))
          .backward();
      scaler.clip_grad_norm_(optimizer->parameters(), 0.5);
      scaler.step(*optimizer);
      optimizer->zero_grad();
    }
  };
}

/// Context-parallel attention on an input of shape (tokens, 8), sharded along the tokens.
struct SplitMixer : nn::Module<SplitMixer> {
  explicit SplitMixer(const DeviceMesh& mesh) : split_(mesh) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto parts = (*in)(x).view({1, x.size(0), 6, 4}).transpose(1, 2).chunk(3, 1);
    const at::Tensor y = split_.attention(parts[0], parts[1], parts[2]);
    return x + (*out)(y.transpose(1, 2).reshape({x.size(0), 8}));
  }
  nn::Child<nn::Linear> in{*this, "in", 8, 24}, out{*this, "out", 8, 8};

 private:
  nn::ContextParallel split_;
};

void split_sequences(CheckedRank& rank) {
  const DeviceMesh mesh = rank.mesh({2}, {"cp"});
  const auto first = std::make_shared<SplitMixer>(mesh),
             second = std::make_shared<SplitMixer>(mesh);
  testing::Filled<nn::Sequential> model(first, second);
  for (const auto& block : {first, second}) {
    fsdp::fully_shard(*block, mesh);
  }
  fsdp::fully_shard(model, mesh);
  rank.watch(model);
  optim::AdamW optimizer(model, {});
  for (int step = 0; step < kSteps; ++step) {
    model(uniform_values({6, 8}, step + rank.rank().rank())).square().sum().backward();
    update(optimizer);
  }
}

/// Training programs as in llama_train: tensor parallelism, recomputation, LoRA, Muon, loss
/// scaling, and context parallelism.
std::vector<Scenario> llama_scenarios() {
  const fsdp::Options offload{.offload_policy = fsdp::OffloadPolicy{}};
  return {{"TensorParallel", 4, llama_training({})},
          {"Recomputed", 4, llama_training({.recomputes = true})},
          {"RecomputedZero2", 4,
           llama_training({.options = {.reshard_after_forward = false}, .recomputes = true})},
          {"Adapters", 4, llama_training({.has_adapters = true})},
          {"Muon", 4, llama_training({.by_muon = true})},
          {"LossScaling", 4, llama_training({.scales = true})},
          {"OffloadTensorParallel", 4, llama_training({.options = offload})},
          {"OffloadMuon", 4, llama_training({.options = offload, .by_muon = true})},
          {"OffloadLossScaling", 4,
           llama_training({.options = offload, .recomputes = true, .scales = true})},
          {"ContextParallel", 2, split_sequences}};
}

std::vector<Scenario> all_scenarios() {
  const Options columns{.shard_placement = last_dim};
  Options columns_of_neighbours = columns;
  columns_of_neighbours.post_forward_mesh_size = 2;
  const Options halves{.mp_policy = {.param_dtype = at::kBFloat16}};
  Options columns_kept = columns;
  columns_kept.reshard_after_forward = false;
  const auto hook = [](SmallModel& model) {
    fsdp::set_all_reduce_hook(model, [](const at::Tensor& gradients) { gradients.mul_(3); });
  };
  const Options offload{.offload_policy = fsdp::OffloadPolicy{}};
  std::vector<Scenario> all{
      {"Zero3", 3, training({3})},
      {"EvenRows", 2, training({2}, {}, {}, 2, {.dim = 4, .hidden = 6, .classes = 2})},
      {"Zero2", 2, training({2}, {.reshard_after_forward = false})},
      {"OneRank", 1, training({1})},
      {"Columns", 3, training({3}, columns)},
      {"ColumnsZero2", 3, training({3}, columns_kept)},
      {"Bf16", 2, training({2}, halves)},
      {"Hpz", 4, training({4}, {.post_forward_mesh_size = 2}, {}, 2)},
      {"HpzColumns", 4, training({4}, columns_of_neighbours)},
      {"Hsdp", 4, training({2, 2})},
      {"Offload", 2, training({2}, offload)},
      {"OffloadAccumulation", 2, training({2}, offload, {}, 2)},
      {"OffloadHsdp", 4, training({2, 2}, offload)},
      {"Hook", 3, training({3}, {}, hook, 2)},
      {"Accumulation", 2, accumulate},
      {"OverlappingMicroBatches", 2, overlap_micro_batches},
      {"ByHand", 2, gather_by_hand},
      {"PostOptimEvent", 2, follow_an_event}};
  std::ranges::move(llama_scenarios(), std::back_inserter(all));
  return all;
}

const std::vector<Scenario>& scenarios() {
  static const std::vector<Scenario> all = all_scenarios();
  return all;
}

/// Runs a Scenario under the checker. The wait with the name `left_out` is not reported.
Findings check(const Scenario& scenario, const Site& left_out = {}) {
  Findings findings;
  std::mutex mutex;
  RunRanks(scenario.ranks, [&](Rank& rank) {
    CheckedRank checked(rank, left_out);
    scenario.train(checked);
    const std::lock_guard lock(mutex);
    const auto& faults = checked.checker().faults();
    findings.faults.insert(findings.faults.end(), faults.begin(), faults.end());
    findings.sites.insert(checked.streams().sites().begin(), checked.streams().sites().end());
  });
  return findings;
}

class CheckedTraining : public ::testing::TestWithParam<Scenario> {};

TEST_P(CheckedTraining, HasNoRace) {
  const Findings findings = check(GetParam());
  EXPECT_TRUE(findings.faults.empty()) << fmt::format("{}", fmt::join(findings.faults, "\n"));
}

INSTANTIATE_TEST_SUITE_P(Ways, CheckedTraining, ::testing::ValuesIn(scenarios()),
                         [](const auto& info) { return info.param.name; });

// Leaves out one wait at a time. The checker must then find a race.

/// Waits without which the tests find no race, and the reasons.
const std::map<Site, std::string> kSurvivors{
    // Only copies to the host need this wait, and tests on the CPU have no such copies. Tested by
    // Offload.AddsGradientsAndCallsHooksAfterTheCopy.
    {"tessera::fsdp::CommContext::settle: the host after compute", "no copy to the host"}};

bool is_of_library(const Site& site) {
  return site.starts_with("tessera::");
}

struct Mutation {
  std::vector<const Scenario*> passes;  ///< scenarios in which this wait occurs
  std::string found;                    ///< the first race that was found, and its scenario
};

std::map<Site, Mutation> all_mutations() {
  std::map<Site, Mutation> mutations;
  for (const Scenario& scenario : scenarios()) {
    for (const Site& site : check(scenario).sites) {
      if (is_of_library(site)) {
        mutations[site].passes.push_back(&scenario);
      }
    }
  }
  return mutations;
}

TEST(Mutations, AreAllFound) {
  std::map<Site, Mutation> mutations = all_mutations();
  std::string table;
  std::size_t found = 0;
  std::vector<Site> survivors;
  for (auto& [site, mutation] : mutations) {
    for (const Scenario* scenario : mutation.passes) {
      const Findings findings = check(*scenario, site);
      if (!findings.faults.empty()) {
        mutation.found = scenario->name + ": " + findings.faults.front();
        break;
      }
    }
    table +=
        fmt::format("{}\n    {}\n", site, mutation.found.empty() ? "SURVIVES" : mutation.found);
    if (!mutation.found.empty()) {
      ++found;
    } else if (!kSurvivors.contains(site)) {
      survivors.push_back(site);
    }
  }
  fmt::print("{}{} of {} waits that are left out are found\n", table, found, mutations.size());
  EXPECT_TRUE(survivors.empty()) << fmt::format("{}", survivors.size()) << " survive";
}

// The following tests check races that occur in no training program: reads of memory that was never
// written, for example.

using comm::Lane;
using comm::LaneScope;

std::vector<std::string> faults_of(const std::function<void(CheckedRank&)>& work) {
  std::vector<std::string> faults;
  RunRanks(1, [&](Rank& rank) {
    CheckedRank checked(rank);
    work(checked);
    faults = checked.checker().faults();
  });
  return faults;
}

TEST(RaceChecker, ComparesOnlyAccessedElements) {
  EXPECT_EQ(faults_of([](CheckedRank& rank) {
              const at::Tensor a = at::ones({8});
              rank.streams().order(Lane::kCompute, Lane::kAllGather);
              a.narrow(0, 0, 4).mul_(2);
              const LaneScope lane(rank.streams(), Lane::kAllGather);
              a.narrow(0, 4, 4).mul_(2);
            }).size(),
            0u);
}

TEST(RaceChecker, FindsReadsOfUnwrittenMemory) {
  const auto faults = faults_of([](CheckedRank&) {
    const at::Tensor a = at::empty({128});
    EXPECT_TRUE(a.isnan().all().item<bool>());
  });
  ASSERT_FALSE(faults.empty());
  EXPECT_CONTAINS(faults.front(), "nobody has written", "memory in lane compute");
}

TEST(RaceChecker, FindsEarlyReuseOfFreedMemory) {
  const auto use_elsewhere = [](CheckedRank& rank, bool waits) {
    at::Tensor a = at::ones({8});
    rank.streams().order(Lane::kCompute, Lane::kAllGather);
    {
      const LaneScope lane(rank.streams(), Lane::kAllGather);
      a.sum();
    }
    if (waits) {
      rank.streams().order(Lane::kAllGather, Lane::kCompute);
    }
    a.reset();
    at::ones({8});
  };
  EXPECT_EQ(faults_of([&](CheckedRank& rank) { use_elsewhere(rank, true); }).size(), 0u);
  const auto faults = faults_of([&](CheckedRank& rank) { use_elsewhere(rank, false); });
  ASSERT_FALSE(faults.empty());
  EXPECT_CONTAINS(faults.front(), "was freed, and is taken by memory in lane compute before",
                  "aten::sum in lane all_gather");
}

TEST(RaceChecker, FindsAMissingWaitForACollective) {
  std::vector<std::string> faults;
  RunRanks(2, [&](Rank& rank) {
    CheckedRank checked(rank);
    const DeviceMesh mesh = checked.mesh({2}, {"dp"});
    const at::Tensor a = at::ones({8});
    const comm::PurposeScope purpose(mesh.group(), "unit 'a'");
    const comm::WorkPtr work = mesh.group().all_reduce(a, ReduceOp::kSum);
    a.sum();
    work->wait();
    a.sum();
    if (rank.rank() == 0) {
      faults = checked.checker().faults();
    }
  });
  ASSERT_EQ(faults.size(), 1u);
  EXPECT_CONTAINS(faults.front(), "aten::sum in lane compute reads what",
                  "all_reduce of unit 'a' over group 'dp' writes");
}

}  // namespace
}  // namespace tessera::race
