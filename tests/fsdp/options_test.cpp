// Compares training with options of fully_shard() to training on one rank with the whole batch.
// Also tests to which device a unit moves its buffers and inputs.

#include <cmath>

#include "fsdp/training/training.h"
#include "fsdp/unit.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/optimizer.h"
#include "testing/files.h"

namespace tessera::fsdp::options {

TEST(Options, ShardsTheRequestedDimension) {
  const auto placement = [](const std::string& name,
                            const at::Tensor&) -> std::optional<Placement> {
    return name.ends_with("up.weight")     ? std::optional<Placement>(Shard{1})
           : name.ends_with("down.weight") ? std::optional<Placement>(Shard{-1})
           : name.ends_with("down.bias")   ? std::optional<Placement>(Replicate{})
                                           : std::nullopt;
  };
  const std::vector<at::Tensor> expected = gradients_alone();
  RunSharded(4, {.shard_placement = placement}, [&](Rank& rank, ShardedModel& model) {
    const auto placements = [](const nn::Linear& linear, const std::string& name) {
      return DistributedTensor(linear.slot(name)->persistent()).placements();
    };
    const Block& block = *model.blocks[0];
    EXPECT_EQ(placements(*block.up, "weight"), Placements{Shard{1}});
    EXPECT_EQ(placements(*block.down, "weight"), Placements{Shard{1}});
    EXPECT_EQ(placements(*block.down, "bias"), Placements{Replicate{}});
    EXPECT_EQ(placements(*block.up, "bias"), Placements{Shard{0}});
    local_loss(model, rank).backward();
    expect_gradients(model, expected);
  });
}

struct Mixture : nn::Module<Mixture> {
  at::Tensor forward(const at::Tensor& x) { return (*dense)(x) + (*experts)(x); }
  nn::Child<nn::Linear> dense{*this, "dense", 3, 4}, experts{*this, "experts", 3, 4};
};

/// Shards the experts over the mesh dimension "efsdp", and all other parameters over all of `mesh`.
void shard_mixture(Mixture& model, const DeviceMesh& mesh) {
  const auto mesh_of_experts = [&](const std::string& name, const at::Tensor&) {
    return name.starts_with("experts") ? std::optional(mesh["efsdp"]) : std::nullopt;
  };
  fully_shard(model, mesh.flatten("dp"), {.parameter_mesh = mesh_of_experts});
}

TEST(Options, ShardsParametersOnTheirOwnMesh) {
  const at::Tensor x = uniform_values({8, 3}, 1);
  Filled<Mixture> alone;
  alone(x).square().sum().backward();
  RunOnMesh({2, 2}, {"ep", "efsdp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Filled<Mixture> model;
    shard_mixture(model, mesh);
    const at::Tensor rows = x.narrow(0, 2 * rank.rank(), 2);
    const Sent sent(rank);
    model(rows).square().sum().backward();
    EXPECT_EQ(sent.calls("dp", "all_gather"), 1);
    EXPECT_EQ(sent.calls("efsdp", "all_gather"), 1);
    EXPECT_TRUE(full_grad(*model.dense).allclose(alone.dense->weight->grad().div(4), 1e-4, 1e-5));
    // FSDP divides all gradients by four ranks, although the experts' mesh "efsdp" has two.
    const at::Tensor experts = full_grad(*model.experts).mul(4);
    mesh.group("ep").all_reduce(experts, ReduceOp::kSum)->wait();
    EXPECT_TRUE(experts.allclose(alone.experts->weight->grad(), 1e-4, 1e-5));
  });
}

// The experts are one tensor that is sharded over "ep" and "efsdp". Norms must count each element
// once, and a checkpoint must equal the checkpoint of one rank.
TEST(StackedExperts, HaveTheNormAndCheckpointOfOneRank) {
  const testing::TemporaryFolder folder;
  Filled<Mixture> alone;
  for (const auto& [name, slot] : alone.named_slots()) {
    slot->get().mutable_grad() = uniform_values(slot->get().sizes(), 5);
  }
  const double expected = optim::grad_norm(optim::slots_of(alone)).item<double>();
  RunOnMesh({2, 2}, {"ep", "efsdp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Filled<Mixture> model;
    for (const auto& [name, slot] : model.experts->slots()) {
      nn::distribute_parameter(*slot, mesh["ep"], {Shard{0}});
    }
    shard_mixture(model, mesh);
    checkpoint::save(*rank.world(), folder.path(), 1, {model});
    for (const auto& [name, slot] : model.named_slots()) {
      const ShardingSpec& spec = sharding_spec(slot->persistent());
      slot->persistent().mutable_grad() =
          distribute_tensor(uniform_values(slot->persistent().sizes(), 5), spec.mesh,
                            DistributedTensor(slot->persistent()).placements())
              .tensor();
    }
    EXPECT_NEAR(optim::grad_norm(optim::slots_of(model)).item<double>(), expected, 1e-5);
  });
  RunRanks(1, [&](Rank& rank) {
    Mixture loaded;
    checkpoint::load(*rank.world(), folder.path(), {loaded});
    EXPECT_TRUE(loaded.experts->weight->equal(*alone.experts->weight));
    EXPECT_TRUE(loaded.dense->bias->equal(*alone.dense->bias));
  });
}

// Ranks along "ep" have different experts, so a norm must include the experts of all these ranks.
TEST_ON_MESH(Options, CountsParametersOnAnotherMeshInNorms, {2, 2}, {"ep", "efsdp"}) {
  Filled<Mixture> model;
  shard_mixture(model, mesh);
  model(uniform_values({2, 3}, rank.rank())).square().sum().backward();
  std::vector<nn::SlotPtr> slots;
  at::Tensor dense = at::zeros({}), experts = at::zeros({});
  for (const auto& [name, slot] : model.named_slots()) {
    slots.push_back(slot);
    (name.starts_with("experts") ? experts : dense)
        .add_(full_tensor(slot->persistent().grad()).square().sum());
  }
  mesh.group("ep").all_reduce(experts, ReduceOp::kSum)->wait();
  const double expected = std::sqrt((dense + experts).item<double>());
  EXPECT_NEAR(optim::grad_norm(slots).item<double>(), expected, 1e-5 * expected);
}

TEST(Options, AcceptsParametersOfAnyStrides) {
  Filled<nn::Linear> alone(5, 4);
  const at::Tensor x = uniform_values({2, 5}, 1);
  alone(x).sum().backward();
  RunOnMesh({3}, {"dp"}, [&](const DeviceMesh& mesh) {
    Filled<nn::Linear> linear(5, 4);
    const at::Tensor transposed = linear.weight->detach().t().contiguous().t();
    ASSERT_FALSE(transposed.is_contiguous());
    linear.slot("weight")->set(transposed.requires_grad_());
    fully_shard(linear, mesh);
    linear(x).sum().backward();
    EXPECT_TRUE(full_grad(linear).allclose(alone.weight->grad()));
  });
}

TEST_ON_MESH(Options, TrainsParametersOfSeveralDtypesInOneUnit, {2}, {"dp"}) {
  Filled<nn::Linear> linear(3, 4), with_double(3, 4);
  linear.slot("weight")->set(linear.weight->detach().to(at::kBFloat16).requires_grad_());
  fully_shard(linear, mesh, {.mp_policy = {.param_dtype = at::kFloat}});
  linear(at::ones({2, 3})).sum().backward();
  EXPECT_TRUE(full_grad(linear).equal(at::ones({4, 3}, at::kBFloat16).mul(2)));
  EXPECT_EQ(linear.slot("weight")->persistent().grad().scalar_type(), at::kBFloat16);
  EXPECT_EQ(linear.slot("bias")->persistent().grad().scalar_type(), at::kFloat);
  const at::Tensor bias = with_double.bias->detach().to(at::kDouble);
  with_double.slot("bias")->set(bias.clone().requires_grad_());
  fully_shard(with_double, mesh);
  unshard(with_double);
  EXPECT_EQ(with_double.bias->scalar_type(), at::kDouble);
  EXPECT_TRUE(with_double.bias->detach().equal(bias));
}

/// The parameter `w` has one row for each expert. The mesh dimension "ep" shards the rows.
struct Experts : nn::Module<Experts> {
  explicit Experts(std::int64_t count) { w = register_slot("w", at::ones({count, 3})); }
  at::Tensor forward(const at::Tensor& x, std::int64_t chosen) {
    const at::Tensor own = ep ? DistributedTensor(*w).to_local() : *w;
    const std::int64_t first =
        ep ? chunk_offset(w.slot()->persistent().size(0), ep.size(), ep.local_rank()) : 0;
    at::Tensor sum = x * offset;
    for (std::int64_t i = 0; i < own.size(0); ++i) {
      if (first + i == chosen) {
        sum = sum + (own[i] * x).sum();
      }
    }
    return sum.sum();
  }
  nn::Parameter w;
  DeviceMesh ep;
  at::Tensor offset = at::ones({1}).requires_grad_(true);
};

struct ExpertsCase {
  std::int64_t dp, ep, experts;
};

class ExpertsWithoutRows : public ::testing::TestWithParam<ExpertsCase> {};

TEST_P(ExpertsWithoutRows, AreUpdatedLikeOnOneRank) {
  const ExpertsCase& c = GetParam();
  RunOnMesh({c.dp, c.ep}, {"dp", "ep"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Experts model(c.experts), alone(c.experts);
    model.ep = mesh["ep"];
    nn::distribute_parameter(*model.w.slot(), mesh["ep"], {Shard{0}});
    Options options;
    options.parameter_mesh = [&](const std::string&, const at::Tensor&) {
      return std::optional(mesh["dp"]);
    };
    fully_shard(model, mesh.flatten("all"), options);
    optim::AdamW optimizer(model, {.lr = 0.1, .weight_decay = 0.5});
    optim::AdamW optimizer_alone(alone, {.lr = 0.1, .weight_decay = 0.5});
    const at::Tensor x = at::ones({3});
    // In steps 0 to 3, a rank chooses: expert `own`; expert 0; no expert (-1); the last expert.
    for (const int step : {0, 1, 2, 3}) {
      const std::int64_t own = rank.rank() % c.experts;
      const std::int64_t chosen[] = {own, 0, -1, c.experts - 1};
      model(x, chosen[step]).backward();
      for (int other = 0; other < rank.size(); ++other) {
        const std::int64_t theirs[] = {other % c.experts, 0, -1, c.experts - 1};
        // On the mesh, rank `other` can choose only the experts that are on this rank.
        const std::int64_t first = chunk_offset(c.experts, c.ep, other % c.ep);
        const std::int64_t rows = chunk_size(c.experts, c.ep, other % c.ep);
        const std::int64_t expert = theirs[step];
        if (expert >= first && expert < first + rows) {
          (alone(x, expert) / rank.size()).backward();
        }
      }
      optimizer.step();
      optimizer_alone.step();
      optimizer.zero_grad();
      optimizer_alone.zero_grad();
    }
    EXPECT_TRUE(full_tensor(model.w.slot()->persistent()).allclose(*alone.w, 1e-5, 1e-6));
    for (const auto& [name, tensor] : optim::named_state(optimizer, model)) {
      EXPECT_TRUE(name != "w.step" || tensor.item<double>() == 3);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, ExpertsWithoutRows,
                         ::testing::Values(ExpertsCase{1, 1, 2}, ExpertsCase{1, 2, 2},
                                           ExpertsCase{1, 2, 3}, ExpertsCase{2, 2, 4},
                                           ExpertsCase{1, 4, 3}),
                         [](const auto& info) { return "Case" + std::to_string(info.index); });

// In the following tests, the device "meta" stands for a GPU.

/// A libtorch module that does not derive from tessera::nn::Module.
struct Counter : torch::nn::Module {
  Counter() { counts = register_buffer("counts", at::ones({2}, at::kDouble)); }
  at::Tensor counts;
};

struct Buffered : nn::Module<Buffered> {
  explicit Buffered(bool leaf = false) {
    mask = register_buffer_slot("mask", {3});
    steps = register_buffer_slot("steps", {2});
    steps.slot()->set(at::ones({2}, at::kLong));
    weight = register_slot("weight", {5, 3});
    if (!leaf) {
      below = register_module("below", std::make_shared<Buffered>(true));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    seen = x;
    return x.matmul((*weight).t());
  }
  nn::Parameter mask, steps, weight;
  at::Tensor seen;
  std::shared_ptr<Buffered> below;
};

bool all_on(const Buffered& module, c10::Device device) {
  return module.mask->device() == device && module.steps->device() == device;
}

TEST(MoveBuffers, MovesAllDtypesButNothingOffMeta) {
  Buffered module;
  for (const c10::DeviceType device : {at::kMeta, at::kCPU}) {
    move_buffers({&module}, device, {});
    EXPECT_TRUE(all_on(module, at::kMeta));
    EXPECT_TRUE(all_on(*module.below, at::kMeta));
  }
  EXPECT_EQ(module.steps->scalar_type(), at::kLong);
  EXPECT_TRUE(module.weight->is_cpu());
}

TEST_ON_RANKS(MoveBuffers, SkipsNestedUnitsAndMetaModels, 3) {
  Buffered module, on_meta;
  fully_shard(*module.below, world_mesh(rank.world()));
  move_buffers({&module}, at::kMeta, {});
  EXPECT_TRUE(all_on(module, at::kMeta));
  EXPECT_TRUE(all_on(*module.below, at::kCPU));
  move_buffers({&on_meta}, at::kMeta, {});
  fully_shard(on_meta, world_mesh(rank.world()));
  EXPECT_TRUE(all_on(on_meta, at::kMeta));
}

TEST(MoveBuffers, SkipsIgnoredBuffers) {
  Buffered module;
  move_buffers({&module}, at::kMeta, {module.below->mask.slot()});
  EXPECT_TRUE(module.mask->is_meta());
  EXPECT_TRUE(module.below->mask->is_cpu());
  EXPECT_TRUE(module.below->steps->is_meta());
}

TEST_ON_RANKS(MoveBuffers, CopiesNoBufferOnTheRightDevice, 3) {
  for (const auto wrap :
       {+[](Buffered& to, const Rank& by) { fully_shard(to, world_mesh(by.world())); },
        +[](Buffered& to, const Rank& by) { replicate(to, world_mesh(by.world())); }}) {
    Buffered module;
    const auto counter = module.register_module("counter", std::make_shared<Counter>());
    const at::Tensor mask = module.mask, steps = module.steps, counts = counter->counts;
    const void* memory = counts.data_ptr();
    wrap(module, rank);
    EXPECT_TRUE(mask.is_same(module.mask));
    EXPECT_TRUE(steps.is_same(module.steps));
    EXPECT_TRUE(counts.is_same(counter->buffers()[0]));
    EXPECT_EQ(counts.data_ptr(), memory);
    EXPECT_EQ(counts.scalar_type(), at::kDouble);
  }
}

TEST(MoveInputs, MovesPlainTensorsFromOtherDevices) {
  at::Tensor here = at::ones({2}).requires_grad_(), there = at::empty({2}, at::device(at::kMeta)),
             none;
  const at::Tensor same = here;
  std::vector<at::Tensor*> inputs{&here, &there, &none};
  move_inputs(inputs, at::kCPU);
  EXPECT_TRUE(here.is_same(same));
  EXPECT_TRUE(there.is_meta());
  move_inputs(inputs, at::kMeta);
  EXPECT_TRUE(here.is_meta());
  EXPECT_TRUE(here.requires_grad());
  EXPECT_FALSE(here.is_leaf());
  EXPECT_FALSE(none.defined());
  RunRanks(3, [](Rank& rank) {
    at::Tensor input = distribute_tensor(at::ones({5}), world_mesh(rank.world()), {Shard{0}});
    const at::Tensor before = input;
    std::vector<at::Tensor*> distributed{&input};
    move_inputs(distributed, at::kMeta);
    EXPECT_TRUE(input.is_same(before));
    Filled<Buffered> module;
    module.mask->zero_();
    module.below->mask->zero_();
    fully_shard(module, world_mesh(rank.world()));
    const at::Tensor x = uniform_values({2, 3}, rank.rank());
    module(x).sum().backward();
    EXPECT_TRUE(module.seen.is_same(x));
  });
}

}  // namespace tessera::fsdp::options
