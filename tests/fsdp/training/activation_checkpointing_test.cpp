// Activation checkpointing inside, around and across FSDP units, over tensor parallelism.
#include "tessera/nn/activation_checkpointing.h"

#include "tessera/dtensor/communication_scope.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "testing/small_llama.h"
#include "training.h"

namespace tessera::fsdp {
namespace {

using testing::Block;
using testing::SmallModel;

nn::ActivationCheckpointing blocks(nn::CheckpointOptions options = {}) {
  return {.select = nn::of_class<Block>(), .options = std::move(options)};
}

/// The traffic of a step, and its gradients.
using Step = std::pair<comm::TrafficTable, std::vector<at::Tensor>>;

std::vector<at::Tensor> whole_gradients_of(const nn::ModuleBase& model) {
  std::vector<at::Tensor> gradients;
  for (const auto& [name, slot] : model.named_slots()) {
    gradients.push_back(testing::full_tensor(slot->persistent().grad()));
  }
  return gradients;
}

/// One step of a sharded SmallModel; `forward` runs it to the loss.
template <class Prepare, class Forward>
Step step(Rank& rank, const Options& options, Prepare prepare, Forward forward) {
  testing::Filled<SmallModel> model(7, 10, 3);
  prepare(model);
  testing::shard(model, rank.mesh({rank.size()}, {"dp"}), options);
  const comm::TrafficTable before = rank.world()->traffic().table();
  const std::int64_t rows = testing::kRows / rank.size();
  const at::Tensor x = testing::batch(7, 0).narrow(0, rank.rank() * rows, rows);
  forward(model, x).backward();
  return {rank.world()->traffic().since(before), whole_gradients_of(model)};
}

at::Tensor loss_of(SmallModel& model, const at::Tensor& x) {
  return model(x).to(at::kFloat).square().mean();
}

void expect_same_gradients(const Step& plain, const Step& checkpointed) {
  for (std::size_t i = 0; i < plain.second.size(); ++i) {
    EXPECT_TRUE(at::equal(plain.second[i], checkpointed.second[i])) << "parameter " << i;
  }
}

void expect_same(const Step& plain, const Step& checkpointed) {
  expect_same_gradients(plain, checkpointed);
  ASSERT_EQ(plain.first.size(), checkpointed.first.size());
  for (const auto& [key, traffic] : plain.first) {
    EXPECT_EQ(checkpointed.first.at(key).calls, traffic.calls);
    EXPECT_EQ(checkpointed.first.at(key).bytes, traffic.bytes);
  }
}

struct Case {
  const char* name;
  int ranks;
  Options options;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name << " on " << c.ranks;
}

const MixedPrecisionPolicy kBfloat16{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};

class FsdpCheckpointingWith : public ::testing::TestWithParam<Case> {};

TEST_P(FsdpCheckpointingWith, InsideUnitsAddsNoCollective) {
  RunRanks(GetParam().ranks, [](Rank& rank) {
    const auto plain = step(rank, GetParam().options, [](SmallModel&) {}, loss_of);
    const auto counts = std::make_shared<nn::CheckpointCounts>();
    const auto prepare = [&](SmallModel& model) {
      nn::apply_activation_checkpointing(model, blocks({.counts = counts}));
    };
    expect_same(plain, step(rank, GetParam().options, prepare, loss_of));
    EXPECT_EQ(counts->recomputations, 3);
  });
}

TEST_P(FsdpCheckpointingWith, AroundUnitsAddsNoCollective) {
  RunRanks(GetParam().ranks, [](Rank& rank) {
    const auto plain = step(rank, GetParam().options, [](SmallModel&) {}, loss_of);
    const auto around = [](SmallModel& model, const at::Tensor& x) {
      return nn::checkpoint([&](const at::Tensor& y) { return loss_of(model, y); }, x);
    };
    // The loss too: backward meets its tensors before any unit's results.
    expect_same(plain, step(rank, GetParam().options, [](SmallModel&) {}, around));
  });
}

INSTANTIATE_TEST_SUITE_P(Options, FsdpCheckpointingWith,
                         ::testing::Values(Case{"ZeRO-3", 3, {}}, Case{"ZeRO-3", 1, {}},
                                           Case{"ZeRO-2", 2, {.reshard_after_forward = false}},
                                           Case{"bf16", 2, {.mp_policy = kBfloat16}},
                                           Case{"bf16 ZeRO-2",
                                                3,
                                                {.mp_policy = kBfloat16,
                                                 .reshard_after_forward = false}},
                                           Case{"hpZ", 4, {.post_forward_mesh_size = 2}}));

/// Blocks called through checkpoint() by their parent, outside of their units' hooks.
class Around : public nn::Module<Around> {
 public:
  explicit Around(int depth) {
    for (int i = 0; i < depth; ++i) {
      blocks.push_back(
          register_module("block" + std::to_string(i), std::make_shared<Block>(7, 10)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    const auto call = [](Block* block, const at::Tensor& y) { return (*block)(y).sin(); };
    for (const auto& block : blocks) {
      x = checkpointed ? nn::checkpoint(call, block.get(), x) : call(block.get(), x);
    }
    return x;
  }
  std::vector<std::shared_ptr<Block>> blocks;
  bool checkpointed = false;
};

// With sin after the block, backward asks for a tensor of the region before the block's result has
// its gradient: the recomputation is what gathers the block for backward.
TEST(FsdpCheckpointing, AroundEachBlockGathersOnceForBackward) {
  RunRanks(2, [](Rank& rank) {
    const auto run = [&](bool checkpointed, const MixedPrecisionPolicy& policy) {
      Around model(3);
      model.checkpointed = checkpointed;
      testing::fill(model);
      const DeviceMesh mesh = rank.mesh({2}, {"dp"});
      for (const auto& block : model.blocks) {
        fully_shard(*block, mesh, {.mp_policy = policy});
      }
      fully_shard(model, mesh, {.mp_policy = policy});
      const CommunicationScope communication(mesh);
      model(testing::uniform_values({3, 7}, rank.rank())).sum().backward();
      return Step{communication.table(), whole_gradients_of(model)};
    };
    for (const MixedPrecisionPolicy& policy : {MixedPrecisionPolicy{}, kBfloat16}) {
      const Step plain = run(false, policy);
      EXPECT_EQ(plain.first.at({"dp", "all_gather"}).calls, 6);
      expect_same(plain, run(true, policy));
    }
  });
}

TEST(FsdpCheckpointing, FailureOfOneRankInARecomputationEndsAll) {
  const auto errors = testing::ErrorsOfRanks(3, [](Rank& rank) {
    testing::Filled<SmallModel> model(7, 10, 3);
    nn::apply_activation_checkpointing(model, blocks());
    model.blocks[1]->up->add_forward_pre_hook([&](nn::ModuleBase&, nn::TensorList) {
      if (nn::is_recomputing() && rank.rank() == 1) {
        fail("rank 1 has had enough");
      }
    });
    testing::shard(model, rank.mesh({3}, {"dp"}));
    testing::local_loss(model, rank).backward();
  });
  EXPECT_TRUE(errors[1].starts_with("rank 1 has had enough (in module 'block1.up', ")) << errors[1];
  EXPECT_FALSE(errors[0].empty());
  EXPECT_FALSE(errors[2].empty());
}

TEST(FsdpCheckpointing, TrainsAsOneRankDoesAfterAFailedRecomputation) {
  RunRanks(2, [](Rank& rank) {
    testing::Filled<SmallModel> model(7, 10, 3);
    nn::apply_activation_checkpointing(model, blocks());
    bool broken = true;
    model.blocks[1]->up->add_forward_pre_hook([&](nn::ModuleBase&, nn::TensorList) {
      if (nn::is_recomputing() && std::exchange(broken, false)) {
        fail("the recomputation broke");
      }
    });
    testing::shard(model, rank.mesh({2}, {"dp"}));
    EXPECT_ERROR(testing::local_loss(model, rank).backward(), "the recomputation broke");
    for (const auto& [name, slot] : model.named_slots()) {
      slot->persistent().mutable_grad().reset();  // of units that were done before the failure
    }
    testing::local_loss(model, rank).backward();
    testing::expect_gradients(model, testing::gradients_alone());
  });
}

/// Loss, gradients and traffic of a Llama on dp x tp. `halves`: of its blocks, which gather their
/// inputs, are units too.
Step llama_step(Rank& rank, std::int64_t tp, nn::CheckpointOptions* options, bool halves = false) {
  const DeviceMesh mesh = rank.mesh({rank.size() / tp, tp}, {"dp", "tp"});
  testing::Filled<testing::SmallLlama> model;
  tensor_parallel::parallelize_module(model, mesh["tp"], testing::plan_of_small_llama(true));
  if (options != nullptr) {
    nn::apply_activation_checkpointing(
        model, {.select = nn::of_class<testing::LlamaBlock>(), .options = *options});
  }
  for (const auto& block : model.blocks) {
    if (halves) {
      fully_shard(*block->mixer, mesh["dp"]);
      fully_shard(*block->mlp, mesh["dp"]);
    }
    fully_shard(*block, mesh["dp"]);
  }
  fully_shard(model, mesh["dp"]);
  const StrictScope strict;
  const comm::TrafficTable before = rank.world()->traffic().table();
  const at::Tensor ids = at::arange(7, at::kLong).mul(5).add(mesh.local_rank("dp")).remainder(13);
  tensor_parallel::cross_entropy(model(ids.narrow(0, 0, 6)), ids.narrow(0, 1, 6)).backward();
  return {rank.world()->traffic().since(before), whole_gradients_of(model)};
}

TEST(FsdpCheckpointing, RepeatsTheTensorParallelCollectivesUpToTheLastSavedTensor) {
  RunRanks(4, [](Rank& rank) {
    nn::CheckpointOptions full;
    const Step plain = llama_step(rank, 2, nullptr), again = llama_step(rank, 2, &full);
    expect_same_gradients(plain, again);
    for (const char* collective : {"all_gather", "reduce_scatter"}) {
      EXPECT_EQ(again.first.at({"dp", collective}).calls, plain.first.at({"dp", collective}).calls);
    }
    // A block gathers before the mixer and before the MLP, and scatters after each; the last
    // scatter is not repeated.
    const std::int64_t depth = 2;
    EXPECT_EQ(again.first.at({"tp", "all_gather"}).calls,
              plain.first.at({"tp", "all_gather"}).calls + 2 * depth);
    EXPECT_EQ(again.first.at({"tp", "reduce_scatter"}).calls,
              plain.first.at({"tp", "reduce_scatter"}).calls + depth);
  });
}

// The unit's node stands between the gather and its products, in a recomputation as in forward.
TEST(FsdpCheckpointing, AroundUnitsThatGatherTheirInputsKeepsTheGradients) {
  RunRanks(4, [](Rank& rank) {
    nn::CheckpointOptions full, selective{.policy = nn::save_matmuls_and_attention()};
    const Step plain = llama_step(rank, 2, nullptr, true);
    expect_same_gradients(plain, llama_step(rank, 2, &full, true));
    expect_same_gradients(plain, llama_step(rank, 2, &selective, true));
  });
}

TEST(FsdpCheckpointing, RepeatsNoCollectiveWhoseResultIsKept) {
  RunRanks(4, [](Rank& rank) {
    nn::CheckpointOptions options{.policy = nn::save_operators({"tessera::redistribute"})};
    expect_same(llama_step(rank, 2, nullptr), llama_step(rank, 2, &options));
  });
}

TEST(FsdpCheckpointing, KeepsTheMatmulsOfATensorParallelModel) {
  RunRanks(4, [](Rank& rank) {
    nn::CheckpointOptions selective{.policy = nn::save_matmuls_and_attention(),
                                    .counts = std::make_shared<nn::CheckpointCounts>()};
    const Step plain = llama_step(rank, 2, nullptr), again = llama_step(rank, 2, &selective);
    expect_same_gradients(plain, again);
    // q, k, v, o, gate, up; down comes after the last tensor that is saved.
    EXPECT_EQ(selective.counts->kept_operators, 2 * 7);
    EXPECT_EQ(selective.counts->replayed_operators, 2 * 6);
  });
}

}  // namespace
}  // namespace tessera::fsdp
