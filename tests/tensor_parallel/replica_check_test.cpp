// Tests the checks that replicated parameters and plain inputs are equal on all ranks, and that the
// shards of a parameter are parts of one tensor.

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/optim/adamw.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/environment.h"
#include "testing/module_values.h"

namespace tessera::tensor_parallel {
namespace {

using testing::DebugChecks;
using testing::ErrorsOfRanks;
using testing::fill;
using testing::Filled;

/// Applies one norm to all 4 heads of 2 features, as QK-norm does.
struct NormedHeads : nn::Module<NormedHeads> {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor heads = (*q)(x).view({x.size(0), -1, 2});
    return (*o)((*q_norm)(heads).flatten(1));
  }

  nn::Child<nn::Linear> q{*this, "q", 8, 8, nn::LinearOptions{.bias = false}};
  nn::Child<nn::RMSNorm> q_norm{*this, "q_norm", 2};
  nn::Child<nn::Linear> o{*this, "o", 8, 8, nn::LinearOptions{.bias = false}};
};

struct HeadsModel : nn::Module<HeadsModel> {
  HeadsModel() {
    for (int i = 0; i < 2; ++i) {
      layers->push_back(std::make_shared<NormedHeads>());
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < 2; ++i) {
      x = x + layer(i)(x);
    }
    return (*norm)(x);
  }
  NormedHeads& layer(std::size_t i) { return *layers->at<NormedHeads>(i); }

  nn::Child<nn::ModuleList> layers{*this, "layers"};
  nn::Child<nn::RMSNorm> norm{*this, "norm", 8};
};

ParallelizePlan plan_of_heads() {
  return {{"layers.*.q", colwise_parallel()},
          {"layers.*.q_norm", sequence_parallel({.sequence_dim = 1})},
          {"layers.*.o", rowwise_parallel()}};
}

at::Tensor tokens() {
  return uniform_values({5, 8}, 0.5);
}

/// A style for modules whose plain input is this rank's shard of the tokens.
StylePtr takes_parts() {
  return prepare_module_input({.input_layouts = {Shard{0}}, .desired_input_layouts = {Shard{0}}});
}

TEST(UnevenParts, MustMatchTheAgreedSizes) {
  Filled<nn::RMSNorm> alone(4);
  const at::Tensor x = uniform_values({8, 4}, 0.1);
  const auto errors = ErrorsOfRanks(3, [&](Rank& rank) {
    Filled<nn::RMSNorm> norm(4);
    parallelize_module(norm, rank.mesh({3}, {"tp"}), {{"", takes_parts()}});
    const at::Tensor y = norm(x.chunk(3)[static_cast<std::size_t>(rank.rank())]);
    EXPECT_EQ(y.sizes(), x.sizes());
    EXPECT_TRUE(full_tensor(y).allclose(alone(x).detach()));
    norm(uniform_values({rank.rank() == 0 ? 2 : 3, 4}, 0.1));
  });
  EXPECT_CONTAINS(errors, "the root module", "[Shard(0)]", "[2, 3, 3]", "[3, 3, 2]");
}

TEST(Replicas, AreComparedBeforeTheFirstForward) {
  const auto errors = ErrorsOfRanks(4, [](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2, 2}, {"dp", "tp"});
    Filled<HeadsModel> model;
    if (rank.rank() == 3) {
      model.norm->weight->detach()[5] = 2.5;
    }
    parallelize_module(model, mesh["tp"], plan_of_heads());
    model(tokens());
  });
  for (const std::size_t rank : {2, 3}) {
    EXPECT_CONTAINS(errors[rank], "'norm.weight'", "rank 2", "ranks 3", "[5]", "2.5 on rank 3");
  }
}

// Only in the first training forward, ranks compare their plain inputs.
TEST(PlainInputs, AreComparedInTheFirstTrainingForward) {
  const auto errors = ErrorsOfRanks(4, [](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2, 2}, {"dp", "tp"});
    const auto of_rank = static_cast<double>(rank.rank());
    Filled<HeadsModel> model, other;
    parallelize_module(model, mesh["tp"], plan_of_heads());
    {
      const c10::NoGradGuard none;
      model(tokens());
    }
    // Only the ranks of a tp group need equal inputs. Data-parallel ranks have different inputs.
    model(tokens() + static_cast<double>(mesh.local_rank("dp")));
    model(tokens() + of_rank);
    parallelize_module(other, mesh["tp"], plan_of_heads());
    other(tokens() + of_rank);
  });
  EXPECT_CONTAINS(errors, "plain input 0", "the same batch");
}

TEST_ON_MESH(Replicas, MayDifferIfMarkedDistinct, {2}, {"tp"}) {
  Filled<HeadsModel> model;
  model.norm->weight->detach().fill_(rank.rank() + 1.0);
  model.norm->slot("weight")->set_distinct_along(mesh);
  parallelize_module(model, mesh, plan_of_heads());
  model.layer(0)(tokens());
}

TEST_ON_RANKS(Replicas, OnTheMetaDeviceAreRefused, 2) {
  const nn::MetaDevice meta;
  nn::RMSNorm norm(4);
  parallelize_module(norm, rank.mesh({2}, {"tp"}), {{"", sequence_parallel()}});
  EXPECT_ERROR(norm(at::empty({2, 3, 4}, at::device(c10::kMeta))), "nn::to_empty");
}

struct MasksItsHeads : nn::Module<MasksItsHeads> {
  at::Tensor forward(const at::Tensor& x, const at::Tensor& mask) { return (*q)(x).mul(mask); }
  nn::Child<nn::Linear> q{*this, "q", 8, 8};
};

/// A wrong style that multiplies a replicated tensor's gradient by a rank-dependent factor.
class ScalesGradients final : public ParallelStyle {
 public:
  std::string name() const override { return "scales_gradients"; }
  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(const nn::ModuleBase&) const override {
    return {};
  }
  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    module.add_forward_hook([mesh](auto&, nn::TensorList outputs) {
      const double scale = 1.0 + static_cast<double>(mesh.local_rank());
      outputs[0]->register_hook([scale](const at::Tensor& gradient) { return gradient * scale; });
    });
  }
};

void step_with_scaled_gradients(nn::RMSNorm& norm) {
  norm(uniform_values({6, 4}, 0.1)).square().sum().backward();
}

/// A difference between ranks that Tessera finds only with TESSERA_DEBUG=1.
struct Difference {
  const char* name;
  std::int64_t dp_ranks;
  std::function<void(const DeviceMesh& dp, const DeviceMesh& tp)> act;
  std::vector<std::string_view> words;
};

TEST(DebugMode, ComparesInputsOperandsCopiesAndGradients) {
  const DebugChecks checks("1");
  const std::vector<Difference> cases{
      {"an input that a style takes for replicated",
       1,
       [](const DeviceMesh&, const DeviceMesh& tp) {
         Filled<nn::Embedding> embedding(10, 4);
         parallelize_module(embedding, tp, {{"", rowwise_parallel()}});
         embedding(at::arange(4, at::kLong) + tp.local_rank());
       },
       {"the root module", "(tp=2)", "plain input", "[0]", "the same batch"}},
      {"a plain operand of a distributed tensor",
       1,
       [](const DeviceMesh&, const DeviceMesh& tp) {
         const auto inner = std::make_shared<MasksItsHeads>();
         nn::ModuleList layers;
         layers.push_back(inner);
         fill(layers);
         parallelize_module(layers, tp,
                            {{"0", prepare_module_input({})}, {"0.q", colwise_parallel()}});
         const c10::NoGradGuard none;
         (*inner)(tokens(), at::full({8}, static_cast<double>(tp.local_rank()) + 1.0));
       },
       {"aten::mul", "'0'", "differs"}},
      {"a copy at a later forward",
       1,
       [](const DeviceMesh&, const DeviceMesh& tp) {
         Filled<HeadsModel> model;
         parallelize_module(model, tp, plan_of_heads());
         model(tokens());
         model.norm->weight->detach().add_(tp.local_rank());
         model(tokens());
       },
       {"parameter 'norm.weight' differs"}},
      {"a gradient",
       1,
       [](const DeviceMesh&, const DeviceMesh& tp) {
         Filled<nn::RMSNorm> norm(4);
         parallelize_module(norm, tp, {{"", std::make_shared<ScalesGradients>()}});
         step_with_scaled_gradients(norm);
       },
       {"the gradient of parameter 'weight' differs", "(tp=2)"}},
      // FSDP compares reduced gradients. After the first backward they are still equal: until FSDP
      // knows which gradients are Partial, all ranks use the gradient of one rank.
      {"a gradient of shards",
       2,
       [](const DeviceMesh& dp, const DeviceMesh& tp) {
         Filled<nn::RMSNorm> norm(4);
         parallelize_module(norm, tp, {{"", std::make_shared<ScalesGradients>()}});
         fsdp::fully_shard(norm, dp);
         step_with_scaled_gradients(norm);
         step_with_scaled_gradients(norm);
       },
       {"the gradient of parameter 'weight' differs"}}};
  for (const Difference& difference : cases) {
    SCOPED_TRACE(difference.name);
    const auto ranks = static_cast<int>(2 * difference.dp_ranks);
    const auto errors = ErrorsOfRanks(ranks, [&](Rank& rank) {
      const DeviceMesh mesh = rank.mesh({difference.dp_ranks, 2}, {"dp", "tp"});
      difference.act(mesh["dp"], mesh["tp"]);
    });
    EXPECT_TRUE(testing::Contains(errors, difference.words));
    EXPECT_CONTAINS(errors.front(), "rank 0");
    EXPECT_CONTAINS(errors.back(), difference.dp_ranks == 1 ? "rank 0" : "rank 2");
  }
}

/// Adds the results of the Linears a and b. The plan shards a's result and has no entry for b.
struct SumOfTwo : nn::Module<SumOfTwo> {
  at::Tensor forward(const at::Tensor& x) { return (a(x) + b(x)).square().sum(); }
  nn::Child<nn::Linear> a{*this, "a", 8, 6};
  nn::Child<nn::Linear> b{*this, "b", 8, 6};
};

TEST(DebugMode, AcceptsGradientsThatOperatorsSharded) {
  const DebugChecks checks("1");
  Filled<SumOfTwo> alone;
  alone(tokens()).backward();
  RunRanks(2, [&](Rank& rank) {
    Filled<SumOfTwo> model;
    parallelize_module(model, rank.mesh({2}, {"tp"}), {{"a", colwise_parallel()}});
    model(tokens()).backward();
    const at::Tensor& split = model.b->weight.slot()->persistent();
    EXPECT_EQ(DistributedTensor(split).placements(), Placements{Replicate{}});
    EXPECT_EQ(DistributedTensor(split.grad()).placements(), Placements{Replicate{}});
    EXPECT_TRUE(full_tensor(split.grad()).allclose(alone.b->weight->grad()));
    optim::Sgd(model, {.lr = 0.1}).step();
    EXPECT_NO_THROW(model(tokens()));
  });
}

namespace split_origins {

constexpr auto kDifferent = "parts of different tensors";

at::Tensor call(nn::Linear& linear) {
  return linear(uniform_values({3, 4}, 1));
}

void split(nn::Linear& linear, const DeviceMesh& mesh) {
  parallelize_module(linear, mesh, {{"", colwise_parallel()}});
}

TEST(ShardedParameters, OfDifferentSeedsOrValuesAreRefused) {
  RunRanks(3, [](Rank& rank) {
    nn::Linear linear(4, 5);
    nn::init_weights(linear, rank.rank() == 2 ? 1 : 0);
    split(linear, rank.mesh({3}, {"tp"}));
    EXPECT_ERROR(call(linear), "tensor parallelism", "'weight' on rank 0 and rank 2", kDifferent);
  });
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    const auto from_meta = testing::made_on_meta<nn::Linear>(4, 5);
    split(*from_meta, mesh["tp"]);
    nn::to_empty(*from_meta, at::kCPU);
    nn::init_weights(*from_meta, static_cast<std::uint64_t>(mesh.local_rank("tp")));
    EXPECT_ERROR(call(*from_meta), kDifferent);
    testing::Filled<nn::Linear> sharded(4, 5);
    if (mesh.local_rank("tp") == 1) {
      const at::NoGradGuard no_grad;
      sharded.slot("weight")->get().add_(1);
    }
    split(sharded, mesh["tp"]);
    fsdp::fully_shard(sharded, mesh["dp"]);
    EXPECT_ERROR(call(sharded), kDifferent);
  });
}

TEST(ShardedParameters, OfDifferentCountsAreRefused) {
  const auto errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    testing::Filled<nn::Linear> linear(4, 5, nn::LinearOptions{.bias = rank.rank() == 1});
    split(linear, rank.mesh({2}, {"tp"}));
    call(linear);
  });
  EXPECT_CONTAINS(errors, "(tp=2)", "rank 1 has 2", "rank 0 has 1");
  EXPECT_CONTAINS(errors[0], "from parameter 'weight' to parameter 'weight'");
  EXPECT_CONTAINS(errors[1], "from parameter 'weight' to parameter 'bias'");
}

TEST_ON_MESH(ShardedParameters, MayDifferIfWrittenOrMarkedDistinct, {2}, {"tp"}) {
  nn::Linear written(4, 5), distinct(4, 5);
  for (nn::Linear* linear : {&written, &distinct}) {
    nn::init_weights(*linear, static_cast<std::uint64_t>(rank.rank()));
    split(*linear, mesh);
  }
  {
    const at::NoGradGuard no_grad;
    for (const auto& [name, slot] : written.named_slots()) {
      slot->get().fill_(0.5);
    }
  }
  for (const auto& [name, slot] : distinct.named_slots()) {
    slot->set_distinct_along(mesh);
  }
  EXPECT_NO_THROW(call(written));
  EXPECT_NO_THROW(call(distinct));
}

}  // namespace split_origins
}  // namespace
}  // namespace tessera::tensor_parallel
