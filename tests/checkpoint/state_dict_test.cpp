// Tests state dicts in memory, fused parameters in files, and gather_blocks().

#include "tessera/checkpoint/state_dict.h"
#include "checkpoint/known_model.h"
#include "checkpoint/ranks.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/initialization.h"
#include "tessera/optim/adamw.h"

namespace tessera::checkpoint {
namespace {

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
      const TensorDict shared = get_model_state_dict(world, net);
      zero(net);
      EXPECT_FALSE(local_tensor(shared.at("head.weight")).any().item<bool>());
    });
  }
}

TEST_ON_RANKS(StateDicts, HaveTiedParametersUnderEachName, 2) {
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
}

TEST_ON_RANKS(StateDicts, DoNotSplitFusedParameters, 3) {
  nn::FusedLinear fused(3, {{"q", 8}, {"k", 4}, {"v", 4}}, {.bias = false, .groups = 2});
  const at::Tensor values = at::arange(48, at::kFloat).view({16, 3});
  fused.slot("weight")->set(distribute_tensor(values, rank.mesh({3}, {"dp"}), {Shard{0}}));
  const TensorDict full = get_model_state_dict(*rank.world(), fused, kFull);
  ExpectEqual(full, {{"weight", values}});
  zero(fused);
  set_model_state_dict(*rank.world(), fused, full, kFull);
  ExpectEqual(get_model_state_dict(*rank.world(), fused, kFull), {{"weight", values}});
}

TEST_ON_RANKS(StateDicts, CanOmitFrozenParameters, 2) {
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
  set_model_state_dict(*rank.world(), net, all, options);
  ExpectEqual(get_model_state_dict(*rank.world(), net, options), trained);
  EXPECT_EQ(local_tensor(net.head->slot("weight")->persistent()).abs().max().item<float>(), 0.0F);
}

/// Rank 0 passes Values() to set_model_state_dict(), rank 1 `state`. Returns the error message.
std::string error_of(const TensorDict& state, const StateDictOptions& options = kFull) {
  const auto errors = ErrorsOfRanks(2, [&](Rank& rank) {
    Net net;
    Distribute(net, rank.mesh({2, 1}, {"dp", "tp"}), Values());
    ExpectUnchangedByError(net, [&] {
      set_model_state_dict(*rank.world(), net, rank.rank() == 1 ? state : Values(), options);
    });
  });
  EXPECT_EQ(errors[0], errors[1]);
  return errors[0];
}

TEST(StateDicts, ChangeNothingOnAnyRankAfterAMismatch) {
  const auto with_bias = [](const at::Tensor& bias) {
    Tensors values = Values();
    values["middle.bias"] = bias;
    return values;
  };
  Tensors other = Values();
  other.erase("head.weight");
  other["tail.weight"] = at::zeros({2});
  EXPECT_CONTAINS(error_of(other), "missing: head.weight; unexpected: tail.weight");
  EXPECT_CONTAINS(error_of(with_bias(at::zeros({8}))), "'middle.bias'", "[8]", "[7]");
  EXPECT_CONTAINS(error_of(with_bias(at::zeros({7}, at::kLong))), "'middle.bias'", "Long", "Float");
  EXPECT_CONTAINS(error_of(Values(), {}), "set full_state_dict");
  EXPECT_CONTAINS(error_of(Values(), {.broadcast_from_rank0 = true}), "set full_state_dict");
  // With broadcast_from_rank0, set_model_state_dict() must ignore rank 1's wrong state dict.
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

TEST_ON_RANKS(StateDicts, RefuseFullValuesOfUnfilledParameters, 1) {
  nn::Linear linear(2, 3);
  EXPECT_EQ(get_model_state_dict(*rank.world(), linear).size(), 2U);
  EXPECT_ERROR(get_model_state_dict(*rank.world(), linear, kFull),
               "parameter 'weight' was never filled");
  set_model_state_dict(*rank.world(), linear,
                       {{"weight", at::ones({3, 2})}, {"bias", at::ones({3})}}, kFull);
  nn::check_initialized(linear);
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

TEST(StateDicts, MoveOptimizerStateToAnotherMesh) {
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

/// A model with the query, key and value projections of attention in one parameter.
class FusedNet : public nn::Module<FusedNet> {
 public:
  explicit FusedNet(std::int64_t groups, bool bias = true) {
    qkv = register_module("qkv", std::make_shared<nn::FusedLinear>(
                                     3, std::vector<nn::FusedPart>{{"q", 8}, {"k", 4}, {"v", 4}},
                                     nn::FusedLinearOptions{.bias = bias, .groups = groups}));
  }
  std::shared_ptr<nn::FusedLinear> qkv;
};

Tensors separate_values() {
  return {{"q.weight", at::arange(0, 24, at::kFloat).view({8, 3})},
          {"k.weight", at::arange(100, 112, at::kFloat).view({4, 3})},
          {"v.weight", at::arange(200, 212, at::kFloat).view({4, 3})},
          {"q.bias", at::arange(300, 308, at::kFloat)},
          {"k.bias", at::arange(400, 404, at::kFloat)},
          {"v.bias", at::arange(500, 504, at::kFloat)}};
}

/// Fuses separate_values(): each key-value group of the fused tensor has rows of q, k and v.
at::Tensor fused_value(const std::string& leaf, std::int64_t groups) {
  const Tensors values = separate_values();
  std::vector<at::Tensor> rows;
  for (std::int64_t group = 0; group < groups; ++group) {
    for (const char* part : {"q.", "k.", "v."}) {
      rows.push_back(values.at(part + leaf).chunk(groups)[static_cast<std::size_t>(group)]);
    }
  }
  return at::cat(rows);
}

std::vector<LayoutPtr> row_layouts() {
  return {Layout::intern({2, 2}, {{Digit{0, {0, 1}}}}), Layout::intern({2, 2}, {{Digit{0, {1}}}}),
          Layout::intern({2, 2}, {{Digit{2, {}}, Digit{8, {1, 0}}}})};
}

void distribute(FusedNet& net, const DeviceMesh& mesh, LayoutPtr rows) {
  for (const auto& [name, slot] : net.named_slots()) {
    Layout::Dims dims = rows->dims();
    dims.resize(static_cast<std::size_t>(slot->get().dim()));
    const at::Tensor whole =
        distribute_tensor(slot->get().detach(), mesh, {Replicate{}, Replicate{}});
    slot->set(DistributedTensor(whole)
                  .redistribute(Layout::intern({2, 2}, std::move(dims)))
                  .tensor()
                  .detach());
    slot->set_initialized(true);
  }
}

TEST(FusedWeights, AreLoadedAndSavedInParts) {
  TemporaryFolder folder;
  WriteModel(folder / "model.safetensors", separate_values());
  RunOnMesh({2, 2}, {"dp", "tp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    for (const std::int64_t groups : {1, 2, 4}) {
      for (const LayoutPtr& rows : row_layouts()) {
        FusedNet net(groups);
        distribute(net, mesh, rows);
        load_hugging_face(net, folder.path());
        EXPECT_TRUE(at::equal(full_tensor(*net.qkv->weight), fused_value("weight", groups)));
        EXPECT_TRUE(at::equal(full_tensor(*net.qkv->bias), fused_value("bias", groups)));
        save_hugging_face(net, *rank.world(), folder / "out", "{}");
        if (rank.rank() == 0) {
          ExpectEqual(ReadModel(folder / "out/model.safetensors"), separate_values());
        }
      }
    }
  });
}

TEST(FusedWeights, RefuseMissingPartsAndWrongSizes) {
  TemporaryFolder folder;
  Tensors values = separate_values();
  values.erase("k.weight");
  values["v.bias"] = at::zeros({5});
  WriteModel(folder / "model.safetensors", values);
  FusedNet net(2);
  EXPECT_ERROR(load_hugging_face(net, folder.path()), "missing: k.weight",
               "different: v.bias (file [5], model [4])");
}

class Apart : public nn::Module<Apart> {
 public:
  Apart() {
    for (const auto& [name, rows] : {std::pair{"q", 8}, {"k", 4}, {"v", 4}}) {
      register_module(name, std::make_shared<nn::Linear>(3, rows, nn::LinearOptions{false}));
    }
  }
};

TEST(FusedCheckpoint, StoresParametersByTheirParts) {
  const TemporaryFolder dir;
  RunOnMesh({2}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    const at::Tensor rows = at::arange(48, at::kFloat).view({16, 3});
    const auto make = [&](const at::Tensor& values) {
      auto net = std::make_unique<FusedNet>(2, /*bias=*/false);
      net->qkv->slot("weight")->set(distribute_tensor(values, mesh, {Shard{0}}));
      return net;
    };
    const auto saved = make(rows);
    const at::Tensor& weight = saved->qkv->slot("weight")->persistent();
    const NamedTensors optimizer = {{"qkv.weight.exp_avg", weight.detach()},
                                    {"qkv.weight.step", at::full({}, 3.0F)}};
    save(*rank.world(), dir.path(), 1, {*saved, optimizer});
    const auto loaded = make(at::zeros_like(rows));
    const NamedTensors into = {
        {"qkv.weight.exp_avg",
         make(at::zeros_like(rows))->qkv->slot("weight")->persistent().detach()},
        {"qkv.weight.step", at::zeros({})}};
    load(*rank.world(), dir.path(), {*loaded, into});
    for (const at::Tensor& tensor : {loaded->qkv->slot("weight")->persistent(), into[0].second}) {
      EXPECT_TRUE(at::equal(full_tensor(tensor), rows));
    }
    EXPECT_EQ(into[1].second.item<float>(), 3.0F);
    Apart apart;
    load(*rank.world(), dir.path(), {apart}, {.exclude = {"optimizer.**"}});
    EXPECT_TRUE(at::equal(LocalValues(apart).at("k.weight"),
                          at::cat({rows.narrow(0, 4, 2), rows.narrow(0, 12, 2)})));
  });
}

TEST(FusedCheckpoint, MarksAParameterFilledAfterAllPartsAreLoaded) {
  const TemporaryFolder dir;
  RunRanks(1, [&](Rank& rank) {
    FusedNet saved(2, /*bias=*/false), loaded(2, /*bias=*/false);
    saved.qkv->slot("weight")->set(at::ones({16, 3}));
    save(*rank.world(), dir.path(), 1, {saved});
    const LoadOptions without_k{.exclude = {"k.**"}, .partial = {"**"}};
    for (const auto& [options, filled] :
         {std::pair(without_k, false), std::pair(LoadOptions{}, true),
          std::pair(without_k, true)}) {
      load(*rank.world(), dir.path(), {loaded}, options);
      EXPECT_EQ(loaded.qkv->slot("weight")->initialized(), filled);
    }
  });
}

using Sizes = std::vector<std::int64_t>;

/// Calls gather_blocks(). Expects that rank 0 gets each element of `tensor` once, at its index.
void ExpectGathered(const Rank& rank, const at::Tensor& tensor, const at::Tensor& expected,
                    std::int64_t round_elements = 1 << 20) {
  const at::Tensor found = at::full(expected.sizes(), -1, at::kFloat);
  std::int64_t elements = 0;
  const auto visit = [&](std::span<const std::int64_t> offset, const at::Tensor& block) {
    block_at(found, offset, block.sizes()).copy_(block);
    elements += block.numel();
  };
  const DeviceMesh all = rank.mesh({rank.size()}, {"all"});
  gather_blocks(tensor, at::kFloat, all.group(), at::kCPU, visit, round_elements);
  if (rank.rank() == 0) {
    EXPECT_TRUE(at::equal(found, expected));
    EXPECT_EQ(elements, expected.numel());
  } else {
    EXPECT_EQ(elements, 0);
  }
}

const std::vector<Placements> kPlacements = {{Shard{0}, Shard{0}},    {Shard{0}, Shard{1}},
                                             {Shard{1}, Shard{0}},    {Shard{1}, Shard{1}},
                                             {Shard{0}, Replicate{}}, {Replicate{}, Shard{0}},
                                             {Shard{1}, Replicate{}}, {Replicate{}, Replicate{}}};

TEST_ON_MESH(GatherBlocks, GathersEveryPlacementInBoundedRounds, {2, 2}, {"dp", "tp"}) {
  for (const auto& sizes : {Sizes{8, 4}, Sizes{13, 5}, Sizes{1, 3}, Sizes{3, 1, 2}, Sizes{0, 4}}) {
    for (const auto& placements : kPlacements) {
      for (const std::int64_t round_elements : {1, 40, 1 << 20}) {
        const auto full = testing::counting_values(sizes, at::kFloat);
        ExpectGathered(rank, distribute_tensor(full, mesh, placements), full, round_elements);
      }
    }
  }
}

TEST_ON_MESH(GatherBlocks, GathersFromStridedShardsAndSubmeshes, {2, 2}, {"dp", "tp"}) {
  const auto full = testing::counting_values({9, 3}, at::kFloat);
  // In this layout, tp splits the tensor first, and dp then splits each shard.
  const auto layout = Layout::intern({2, 2}, {{Digit{0, {1, 0}}}, {}});
  const auto tensor = DistributedTensor(distribute_tensor(full, mesh, {Replicate{}, Replicate{}}))
                          .redistribute(layout);
  ExpectGathered(rank, tensor, full);
  ExpectGathered(rank, tensor, full, 1);
  ExpectGathered(rank, distribute_tensor(full, mesh["tp"], {Shard{0}}), full);
  ExpectGathered(rank, distribute_tensor(full, mesh["dp"], {Shard{1}}), full);
  const auto partial = DistributedTensor::from_local(at::ones({2}), mesh["dp"], {Partial{}});
  EXPECT_ERROR(check_gatherable(partial, "w"), "parameter 'w' has a Partial placement");
}

/// for_each_piece() must split a block, in element order, into pieces of at most `most` elements.
TEST(PiecesOfABlock, CoverTheBlockInOrder) {
  const std::vector<std::vector<std::int64_t>> blocks = {{},     {7},       {5, 3},   {2, 11},
                                                         {0, 4}, {3, 0, 2}, {2, 3, 5}};
  for (const auto& block : blocks) {
    for (const std::int64_t most : {1, 2, 3, 4, 7, 100}) {
      const at::Tensor all = at::arange(c10::multiply_integers(block)).view(block);
      std::vector<at::Tensor> pieces = {at::empty({0}, at::kLong)};
      for_each_piece(block, most, [&](auto offset, auto sizes) {
        pieces.push_back(block_at(all, offset, sizes).reshape({-1}));
        EXPECT_LE(pieces.back().numel(), most);
        EXPECT_GT(pieces.back().numel(), 0);
      });
      EXPECT_TRUE(at::cat(pieces).equal(all.reshape({-1}))) << all.sizes() << " by " << most;
    }
  }
}

}  // namespace
}  // namespace tessera::checkpoint
