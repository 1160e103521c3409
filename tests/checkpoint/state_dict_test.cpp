// State dicts in memory: the same tensors from every mesh, and back into any.

#include "tessera/checkpoint/state_dict.h"
#include "known_model.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/fused_linear.h"
#include "tessera/nn/initialization.h"
#include "tessera/optim/adamw.h"

namespace tessera::checkpoint {
namespace {

using testing::ErrorsOfRanks;
using Names = std::vector<std::string>;

constexpr StateDictOptions kFull{.full_state_dict = true};
constexpr StateDictOptions kFullOnHost{.full_state_dict = true, .cpu_offload = true};
constexpr StateDictOptions kFromRank0{.full_state_dict = true, .broadcast_from_rank0 = true};

void zero(const nn::ModuleBase& model) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, slot] : model.named_slots()) {
    local_tensor(slot->persistent()).zero_();
  }
}

TEST(StateDicts, RoundTripOnEveryMesh) {
  const std::vector<std::vector<std::int64_t>> meshes = {{1, 1}, {2, 2}, {3, 1}, {1, 4}};
  for (const auto& sizes : meshes) {
    RunRanks(testing::ranks_of(sizes), [&](Rank& rank) {
      comm::World& world = *rank.world();
      Net net;
      Distribute(net, rank.mesh(sizes, {"dp", "tp"}), Values());
      const Tensors local = LocalValues(net);
      const TensorDict full = get_model_state_dict(world, net, kFull);
      ExpectEqual(full, Values());
      const TensorDict on_rank0 = get_model_state_dict(world, net, kFullOnHost);
      ExpectEqual(on_rank0, rank.rank() == 0 ? Values() : Tensors());
      const TensorDict shards = get_model_state_dict(world, net, {.cpu_offload = true});
      const auto expect_set = [&](const TensorDict& state, const StateDictOptions& options) {
        zero(net);
        const IncompatibleKeys keys = set_model_state_dict(world, net, state, options);
        EXPECT_TRUE(keys.missing.empty() && keys.unexpected.empty());
        ExpectEqual(LocalValues(net), local);
      };
      expect_set(full, kFull);
      expect_set(on_rank0, kFromRank0);
      expect_set(shards, {});
    });
  }
}

/// A row is larger than what is sent at once, and is sharded.
TEST(StateDicts, AreSentInPartsOfARow) {
  constexpr std::int64_t kWide = 9 << 20;
  RunOnMesh({2}, {"tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const at::Tensor values = at::arange(kWide, at::kFloat).view({1, kWide});
    nn::Linear net(kWide, 1, nn::LinearOptions{false});
    net.slot("weight")->set(distribute_tensor(at::zeros({1, kWide}), mesh, {Shard{1}}));
    const TensorDict state = rank.rank() == 0 ? TensorDict{{"weight", values}} : TensorDict{};
    set_model_state_dict(*rank.world(), net, state,
                         {.full_state_dict = true, .broadcast_from_rank0 = true});
    EXPECT_TRUE(local_tensor(net.slot("weight")->get())
                    .equal(values.chunk(2, 1)[static_cast<std::size_t>(rank.rank())]));
  });
}

TEST(StateDicts, ShareTheMemoryOfShards) {
  RunRanks(2, [](Rank& rank) {
    Net net;
    Distribute(net, rank.mesh({2, 1}, {"dp", "tp"}), Values());
    const TensorDict shards = get_model_state_dict(*rank.world(), net);
    zero(net);
    EXPECT_EQ(local_tensor(shards.at("head.weight")).abs().max().item<float>(), 0.0F);
  });
}

TEST(StateDicts, HaveTiedParametersUnderEachNameAndTakeThemUnderAny) {
  RunRanks(2, [](Rank& rank) {
    Net net(/*tied=*/true);
    Distribute(net, rank.mesh({2, 1}, {"dp", "tp"}), Values());
    TensorDict full = get_model_state_dict(*rank.world(), net, kFull);
    EXPECT_TRUE(at::equal(full.at("head.weight"), full.at("embed.weight")));
    const Tensors before = LocalValues(net);
    set_model_state_dict(*rank.world(), net, full, kFull);
    TensorDict other = full;
    other["head.weight"] = other["head.weight"] + 1;
    for (const StateDictOptions& options : {kFull, kFromRank0}) {
      EXPECT_ERROR(set_model_state_dict(*rank.world(), net, other, options),
                   "'embed.weight' and 'head.weight' have different values in the state dict");
    }
    ExpectEqual(LocalValues(net), before);
    full.erase("embed.weight");
    zero(net);
    set_model_state_dict(*rank.world(), net, full, kFull);
    ExpectEqual(LocalValues(net), before);
  });
}

TEST(StateDicts, HaveFusedParametersWhole) {
  RunRanks(3, [](Rank& rank) {
    nn::FusedLinear fused(3, {{"q", 8}, {"k", 4}, {"v", 4}}, {.bias = false, .groups = 2});
    const at::Tensor values = at::arange(48, at::kFloat).view({16, 3});
    fused.slot("weight")->set(distribute_tensor(values, rank.mesh({3}, {"dp"}), {Shard{0}}));
    const TensorDict full = get_model_state_dict(*rank.world(), fused, kFull);
    ExpectEqual(full, {{"weight", values}});
    zero(fused);
    set_model_state_dict(*rank.world(), fused, full, kFull);
    ExpectEqual(get_model_state_dict(*rank.world(), fused, kFull), {{"weight", values}});
  });
}

TEST(StateDicts, LeaveFrozenParametersOut) {
  RunRanks(2, [](Rank& rank) {
    Net net;
    Distribute(net, rank.mesh({2, 1}, {"dp", "tp"}), Values());
    for (const auto& [name, slot] : net.named_slots()) {
      slot->persistent().requires_grad_(name.starts_with("middle"));
    }
    StateDictOptions options = kFull;
    const TensorDict all = get_model_state_dict(*rank.world(), net, options);
    options.ignore_frozen_params = true;
    const TensorDict trained = get_model_state_dict(*rank.world(), net, options);
    EXPECT_EQ(trained.size(), 2U);
    EXPECT_TRUE(trained.contains("middle.bias"));
    zero(net);
    set_model_state_dict(*rank.world(), net, all, options);  // and takes no others
    ExpectEqual(get_model_state_dict(*rank.world(), net, options), trained);
    EXPECT_EQ(local_tensor(net.head->slot("weight")->persistent()).abs().max().item<float>(), 0.0F);
  });
}

/// What all ranks throw for a full state dict, which must not change the model.
std::string error_of(const TensorDict& state, const StateDictOptions& options = kFull) {
  const auto errors = ErrorsOfRanks(2, [&](Rank& rank) {
    Net net;
    Distribute(net, rank.mesh({2, 1}, {"dp", "tp"}), Values());
    const Tensors before = LocalValues(net);
    try {
      set_model_state_dict(*rank.world(), net, rank.rank() == 1 ? state : Values(), options);
    } catch (const Error&) {
      ExpectEqual(LocalValues(net), before);
      throw;
    }
  });
  EXPECT_EQ(errors[0], errors[1]);
  return errors[0];
}

TEST(StateDicts, ChangeNothingOnAnyRankWhenTheyDoNotFit) {
  Tensors other = Values();
  other.erase("head.weight");
  other["tail.weight"] = at::zeros({2});
  EXPECT_CONTAINS(error_of(other), "missing: head.weight; unexpected: tail.weight");
  Tensors larger = Values();
  larger["middle.bias"] = at::zeros({8});
  EXPECT_CONTAINS(error_of(larger), "'middle.bias' has the sizes [8] in the state dict and [7]");
  Tensors whole_numbers = Values();
  whole_numbers["middle.bias"] = at::zeros({7}, at::kLong);
  EXPECT_CONTAINS(error_of(whole_numbers), "'middle.bias' is Long in the state dict and Float");
  EXPECT_CONTAINS(error_of(Values(), {}), "set full_state_dict");
  EXPECT_CONTAINS(error_of(Values(), {.broadcast_from_rank0 = true}), "set full_state_dict too");
  // Not looked at on rank 1.
  EXPECT_EQ(error_of(other, kFromRank0), "");
  RunRanks(1, [&](Rank& rank) {
    Net net;
    Distribute(net, rank.mesh({1, 1}, {"dp", "tp"}), Values());
    const IncompatibleKeys keys =
        set_model_state_dict(*rank.world(), net, other, {.full_state_dict = true, .strict = false});
    EXPECT_EQ(keys.missing, Names{"head.weight"});
    EXPECT_EQ(keys.unexpected, Names{"tail.weight"});
  });
}

TEST(StateDicts, HaveNoValuesForUnfilledParameters) {
  RunRanks(1, [](Rank& rank) {
    nn::Linear linear(2, 3);
    EXPECT_EQ(get_model_state_dict(*rank.world(), linear).size(), 2U);
    EXPECT_ERROR(get_model_state_dict(*rank.world(), linear, kFull),
                 "parameter 'weight' was never filled");
    set_model_state_dict(*rank.world(), linear,
                         {{"weight", at::ones({3, 2})}, {"bias", at::ones({3})}}, kFull);
    nn::check_initialized(linear);
  });
}

struct Trained {
  explicit Trained(const DeviceMesh* mesh)
      : linear(5, 7), optimizer(linear, optim::AdamWOptions{.lr = 0.1}) {
    nn::init_weights(linear, 3);
    if (mesh != nullptr) {
      fsdp::fully_shard(linear, *mesh);
    }
  }
  void step() {
    linear(at::arange(10, at::kFloat).view({2, 5})).square().sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  NamedTensors named_state() { return optim::named_state(optimizer, linear); }
  nn::Linear linear;
  optim::AdamW optimizer;
};

TEST(StateDicts, CarryAnOptimizerFromOneMeshToAnotherBeforeItsFirstStep) {
  TensorDict model, state, after;
  RunRanks(1, [&](Rank& rank) {
    Trained trained(nullptr);
    trained.step();
    trained.step();
    comm::World& world = *rank.world();
    model = get_model_state_dict(world, trained.linear, kFullOnHost);
    state = get_optimizer_state_dict(world, trained.linear, trained.named_state(), kFullOnHost);
    trained.step();
    after = get_model_state_dict(world, trained.linear, kFullOnHost);
  });
  EXPECT_EQ(state.at("weight.step").item<float>(), 2.0F);
  RunOnMesh({3}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Trained trained(&mesh);
    comm::World& world = *rank.world();
    set_model_state_dict(world, trained.linear, model, kFull);
    set_optimizer_state_dict(world, trained.linear, trained.named_state(), state, kFull);
    ExpectEqual(get_optimizer_state_dict(world, trained.linear, trained.named_state(), kFull),
                state);
    trained.step();
    for (const auto& [name, tensor] : get_model_state_dict(world, trained.linear, kFull)) {
      EXPECT_TRUE(at::allclose(tensor, after.at(name), 1e-5, 1e-6)) << name;
    }
  });
}

}  // namespace
}  // namespace tessera::checkpoint
