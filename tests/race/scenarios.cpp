#include "race/scenarios.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <any>
#include <iterator>
#include <mutex>

#include "fsdp/training/training.h"
#include "race/llama_scenarios.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"

namespace tessera::race {
namespace {

using fsdp::Options;
using testing::ShardedModel;
using testing::SmallModel;

std::optional<Placement> last_dim(const std::string&, const at::Tensor& tensor) {
  return Shard{tensor.dim() - 1};
}

void update(optim::AdamW& optimizer) {
  optim::clip_grad_norm_(optimizer.parameters(), 0.5);
  optimizer.step();
  optimizer.zero_grad();
}

/// Steps of some micro-batches each. `prepare`: before the first; `between`: before each
/// micro-batch.
void train(CheckedRank& rank, SmallModel& model, int micro_batches = 1,
           const std::function<void(int)>& between = {}) {
  optim::AdamW optimizer(model, {});
  for (int step = 0; step < kSteps; ++step) {
    for (int part = 0; part < micro_batches; ++part) {
      if (between) {
        between(part);
      }
      testing::local_loss(model, rank.rank(), step + part).backward();
    }
    update(optimizer);
  }
}

/// A small model on a mesh, with options and whatever `prepare` sets.
std::function<void(CheckedRank&)> training(std::vector<std::int64_t> sizes,
                                           const Options& options = {},
                                           const std::function<void(SmallModel&)>& prepare = {},
                                           int micro_batches = 1,
                                           const testing::Sizes& model_sizes = {}) {
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

void accumulate(CheckedRank& rank) {
  ShardedModel model(rank.mesh({2}, {"dp"}));
  rank.watch(model);
  train(rank, model, 2, [&](int part) {
    fsdp::set_requires_gradient_sync(model, part == 1);
    fsdp::set_is_last_backward(model, part == 1);
  });
}

void overlap_micro_batches(CheckedRank& rank) {
  ShardedModel model(rank.mesh({2}, {"dp"}));
  rank.watch(model);
  train(rank, model, 2, [&](int part) { fsdp::set_is_last_backward(model, part == 1); });
}

/// Gathers in the compute lane, and in their own by turns.
void change_lanes(CheckedRank& rank) {
  ShardedModel model(rank.mesh({2}, {"dp"}));
  rank.watch(model);
  for (int step = 0; step < kSteps; ++step) {
    fsdp::set_unshard_async_op(model, true);
    const at::Tensor loss = testing::local_loss(model, rank.rank(), step);
    fsdp::set_unshard_async_op(model, false);
    loss.backward();
    testing::descend(model, 0.1);
  }
}

void gather_by_hand(CheckedRank& rank) {
  ShardedModel model(rank.mesh({2}, {"dp"}));
  rank.watch(model);
  train(rank, model, 1, [&](int) {
    const c10::AutoGradMode no_grad(false);
    fsdp::start_unshard(*model.blocks[0]).wait();
    (*model.blocks[0])(testing::uniform_values({2, testing::kDim}, 1));
    fsdp::reshard(*model.blocks[0]);
    const fsdp::UnshardScope unsharded(*model.blocks[1]);
    fsdp::start_unshard(*model.blocks[2]);  // and not used
    fsdp::reshard(*model.blocks[2]);
  });
}

void follow_an_event(CheckedRank& rank) {
  ShardedModel model(rank.mesh({2}, {"dp"}));
  rank.watch(model);
  optim::AdamW optimizer(model, {});
  for (int step = 0; step < kSteps; ++step) {
    fsdp::set_unshard_async_op(model, step > 0);
    testing::local_loss(model, rank.rank(), step).backward();
    // In a separate lane, where it waits for the gradients.
    rank.streams().order(comm::Lane::kCompute, comm::Lane::kAllReduce);
    {
      const comm::LaneScope lane(rank.streams(), comm::Lane::kAllReduce);
      update(optimizer);
    }
    fsdp::set_post_optim_event(model, rank.streams().record(comm::Lane::kAllReduce));
  }
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
      {"ChangingLanes", 2, change_lanes},
      {"ByHand", 2, gather_by_hand},
      {"PostOptimEvent", 2, follow_an_event}};
  std::ranges::move(llama_scenarios(), std::back_inserter(all));
  return all;
}

}  // namespace

const std::vector<Scenario>& scenarios() {
  static const std::vector<Scenario> all = all_scenarios();
  return all;
}

Findings check(const Scenario& scenario, const Site& left_out) {
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

}  // namespace tessera::race
