// Tests activation checkpointing of parts of units, and of one or several whole units.
#include "tessera/nn/detail/records.h"

#include "fsdp/training/training.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "testing/small_llama.h"

namespace tessera::fsdp::checkpointing {

void checkpoint_blocks(SmallModel& model, const nn::CheckpointOptions& options = {}) {
  nn::apply_activation_checkpointing(model, nn::of_class<Block>(), options);
}

using Step = std::pair<comm::TrafficTable, std::vector<at::Tensor>>;

const MixedPrecisionPolicy kBfloat16{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};

Step step(Rank& rank, const Options& options, const std::function<void(SmallModel&)>& prepare,
          const std::function<at::Tensor(SmallModel&, const at::Tensor&)>& forward) {
  Filled<SmallModel> model(kDim, kHidden, kClasses);
  prepare(model);
  shard(model, rank.mesh({rank.size()}, {"dp"}), options);
  const Sent sent(rank);
  forward(model, rows_of_rank(rank)).backward();
  comm::TrafficTable traffic = sent.table();
  return {std::move(traffic), take_gradients(model)};
}

at::Tensor loss_of(SmallModel& model, const at::Tensor& x) {
  return model(x).to(at::kFloat).square().mean();
}

void expect_same(const Step& plain, const Step& checkpointed) {
  EXPECT_EACH(checkpointed.second, plain.second);
  ASSERT_EQ(plain.first.size(), checkpointed.first.size());
  for (const auto& [key, traffic] : plain.first) {
    EXPECT_EQ(checkpointed.first.at(key).calls, traffic.calls);
    EXPECT_EQ(checkpointed.first.at(key).bytes, traffic.bytes);
  }
}

TEST(FsdpCheckpointing, AddsNoCollectives) {
  const std::vector<std::pair<int, Options>> cases{
      {3, {}},
      {1, {}},
      {2, {.reshard_after_forward = false}},
      {2, {.mp_policy = kBfloat16}},
      {3, {.mp_policy = kBfloat16, .reshard_after_forward = false}},
      {4, {.post_forward_mesh_size = 2}}};
  for (const auto& [ranks, options] : cases) {
    SCOPED_TRACE(ranks);
    RunRanks(ranks, [options = options](Rank& rank) {
      const auto nothing = [](SmallModel&) {};
      const Step plain = step(rank, options, nothing, loss_of);
      const auto counts = std::make_shared<nn::CheckpointCounts>();
      const auto inside = [&](SmallModel& model) { checkpoint_blocks(model, {.counts = counts}); };
      expect_same(plain, step(rank, options, inside, loss_of));
      EXPECT_EQ(counts->recomputations, 3);
      // The whole model is one checkpointed function, so the recomputation runs before the backward
      // of any unit.
      const auto around = [](SmallModel& model, const at::Tensor& x) {
        return nn::checkpoint([&](const at::Tensor& y) { return loss_of(model, y); }, x);
      };
      expect_same(plain, step(rank, options, nothing, around));
    });
  }
}

TEST(FsdpCheckpointing, FailsOnAllRanksAndAllowsAnotherStep) {
  for (const bool on_one_rank : {true, false}) {
    const auto errors = ErrorsOfRanks(3, [&](Rank& rank) {
      Filled<SmallModel> model(kDim, kHidden, kClasses);
      checkpoint_blocks(model);
      bool fails = !on_one_rank || rank.rank() == 1;
      model.blocks[1]->up->add_forward_pre_hook([&](nn::ModuleBase&, nn::TensorList) {
        if (nn::is_recomputing() && std::exchange(fails, false)) {
          fail("a broken recomputation");
        }
      });
      shard(model, rank.mesh({3}, {"dp"}));
      if (on_one_rank) {
        local_loss(model, rank).backward();
        return;
      }
      EXPECT_ERROR(local_loss(model, rank).backward(), "a broken recomputation");
      drop_gradients(model);
      local_loss(model, rank).backward();
      expect_gradients(model, gradients_alone());
    });
    if (on_one_rank) {
      EXPECT_CONTAINS(errors[1], "a broken recomputation", "'block1.up'");
    }
    for (const std::string& error : errors) {
      EXPECT_EQ(error.empty(), !on_one_rank) << error;
    }
  }
}

/// Returns the gradients and the traffic of a Llama on a mesh dp x tp. `halves`: whether attention
/// and MLP of each block are separate units.
Step llama_step(Rank& rank, std::int64_t tp, nn::CheckpointOptions* options, bool halves = false) {
  const DeviceMesh mesh = rank.mesh({rank.size() / tp, tp}, {"dp", "tp"});
  Filled<testing::SmallLlama> model;
  tensor_parallel::parallelize_module(model, mesh["tp"], testing::plan_of_small_llama(true));
  if (options != nullptr) {
    nn::apply_activation_checkpointing(model, nn::of_class<testing::LlamaBlock>(), *options);
  }
  for (const auto& block : model.blocks) {
    if (halves) {
      shard_units({&*block->mixer, &*block->mlp}, mesh["dp"]);
    }
    fully_shard(*block, mesh["dp"]);
  }
  fully_shard(model, mesh["dp"]);
  const StrictScope strict;
  const Sent sent(rank);
  const at::Tensor ids = at::arange(7, at::kLong).mul(5).add(mesh.local_rank("dp")).remainder(13);
  tensor_parallel::cross_entropy(model(ids.narrow(0, 0, 6)), ids.narrow(0, 1, 6)).backward();
  comm::TrafficTable traffic = sent.table();
  return {std::move(traffic), take_gradients(model)};
}

TEST_ON_RANKS(FsdpCheckpointing, RepeatsOnlyNecessaryTensorParallelCollectives, 4) {
  nn::CheckpointOptions full, selective{.policy = nn::save_matmuls_and_attention(),
                                        .counts = std::make_shared<nn::CheckpointCounts>()};
  nn::CheckpointOptions collectives{.policy = nn::save_operators({"tessera::redistribute"})};
  const Step plain = llama_step(rank, 2, nullptr), again = llama_step(rank, 2, &full);
  EXPECT_EACH(again.second, plain.second);
  for (const char* collective : {"all_gather", "reduce_scatter"}) {
    EXPECT_EQ(again.first.at({"dp", collective}).calls, plain.first.at({"dp", collective}).calls);
  }
  // Each block has an all-gather before and a reduce-scatter after both attention and the MLP.
  // Backward repeats the all-gathers. The recomputation omits the last reduce-scatter, because no
  // saved tensor needs the result.
  const std::int64_t depth = 2;
  EXPECT_EQ(again.first.at({"tp", "all_gather"}).calls, plain.first.at({"tp", "all_gather"}).calls);
  EXPECT_EQ(again.first.at({"tp", "reduce_scatter"}).calls,
            plain.first.at({"tp", "reduce_scatter"}).calls + depth);
  // If forward saves the results of collectives, the recomputation repeats no collective.
  const Step saved = llama_step(rank, 2, &collectives);
  EXPECT_EACH(saved.second, plain.second);
  EXPECT_EQ(saved.first.at({"tp", "all_gather"}).calls,
            plain.first.at({"tp", "all_gather"}).calls - 2 * depth);
  EXPECT_EQ(saved.first.at({"tp", "reduce_scatter"}).calls,
            plain.first.at({"tp", "reduce_scatter"}).calls);
  EXPECT_EACH(llama_step(rank, 2, &selective).second, plain.second);
  // Forward saves the results of the 7 matrix products of each block. Backward does not need the
  // result of the product `down`, so the recomputation uses 6 results.
  EXPECT_EQ(selective.counts->kept_operators, 2 * 7);
  EXPECT_EQ(selective.counts->replayed_operators, 2 * 6);
  const Step halves = llama_step(rank, 2, nullptr, true);
  EXPECT_EACH(llama_step(rank, 2, &full, true).second, halves.second);
  EXPECT_EACH(llama_step(rank, 2, &selective, true).second, halves.second);
}

}  // namespace tessera::fsdp::checkpointing
