// Tests FSDP together with tensor and sequence parallelism.

#include <array>

#include "fsdp/training/training.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/small_llama.h"

namespace tessera::fsdp::two_dimensional {

using testing::SmallLlama;

void build(SmallLlama& model, const DeviceMesh& mesh) {
  testing::fill(model);
  tensor_parallel::parallelize_module(model, mesh["tp"], testing::plan_of_small_llama(true));
  for (const auto& block : model.blocks) {
    fully_shard(*block, mesh["dp"]);
  }
  fully_shard(model, mesh["dp"]);
}

TEST_ON_MESH(TwoDimensional, SplitsColumnsByTpFirst, {2, 2}, {"dp", "tp"}) {
  SmallLlama model;
  build(model, mesh);
  const auto placements = [](const nn::ModuleBase& module) {
    return DistributedTensor(module.slot("weight")->persistent()).placements();
  };
  EXPECT_EQ(placements(*model.blocks[0]->mixer->q), (Placements{StridedShard{0, 2}, Shard{0}}));
  EXPECT_EQ(placements(*model.blocks[0]->mixer->o), (Placements{Shard{0}, Shard{1}}));
  EXPECT_EQ(placements(*model.norm), (Placements{Shard{0}, Replicate{}}));
}

TEST_ON_MESH(TwoDimensional, SumsNormGradientsOverTpOnce, {2, 2}, {"dp", "tp"}) {
  SmallLlama model;
  build(model, mesh);
  constexpr std::int64_t kTokens = 12;
  const at::Tensor ids = at::arange(kTokens + 1, at::kLong).mul(5).remainder(13);
  const Sent sent(rank);
  tensor_parallel::cross_entropy(model(ids.slice(0, 0, kTokens)), ids.slice(0, 1)).backward();
  const comm::TrafficTable traffic = sent.table();
  // All-reduces over tp: two for the loss, one for the gradients of the norms.
  const comm::Traffic sums = traffic.at({"tp", "all_reduce"});
  EXPECT_EQ(sums.calls, 3);
  EXPECT_EQ(sums.bytes, 4 * (kTokens + 2 * kTokens + 5 * 8 / 2));
  EXPECT_EQ(traffic.at({"dp", "all_gather"}).calls, 2 * 2 + 1);
  EXPECT_EQ(traffic.at({"dp", "reduce_scatter"}).calls, 3);
}

// Tests a parameter whose gradient has different layouts on data-parallel ranks: Partial over tp,
// Replicate, or no gradient.

/// How a rank uses a parameter, which determines the layout of the parameter's gradient.
enum class Use : std::uint8_t {
  kSequence,  ///< kSequence: uses a shard of the tokens (gradient Partial)
  kWhole,     ///< kWhole: uses all tokens (gradient Replicate)
  kNoTokens,  ///< kNoTokens: uses no tokens (gradient of zeros)
  kUnused,    ///< kUnused: does not use the parameter (no gradient)
};
using Uses = std::vector<Use>;
constexpr std::array kUses{Use::kSequence, Use::kWhole, Use::kNoTokens, Use::kUnused};

struct ScaleOfTokens : nn::Module<ScaleOfTokens> {
  explicit ScaleOfTokens(const DeviceMesh& tp) : tp_(tp) {
    weight = register_slot("weight", at::ones({3}));
    nn::distribute_module(*this, tp);
  }
  /// `x`: (batch, sequence, 3).
  at::Tensor forward(const at::Tensor& x, Use use) {
    if (use == Use::kUnused) {
      return x.detach().requires_grad_().sum();
    }
    const at::Tensor tokens = use == Use::kNoTokens ? x.narrow(0, 0, 0) : x;
    const Placement placement = use == Use::kWhole ? Placement(Replicate{}) : Shard{1};
    const at::Tensor on_mesh = distribute_tensor(tokens, tp_, {placement}).tensor();
    return DistributedTensor((on_mesh * *weight).sum()).full_tensor();
  }
  nn::Parameter weight;

 private:
  DeviceMesh tp_;
};

at::Tensor tokens_of(std::int64_t seed) {
  return uniform_values({2, 4, 3}, seed);
}

void run(ScaleOfTokens& model, const Uses& uses, std::int64_t part) {
  model(tokens_of(part), uses[static_cast<std::size_t>(part)]).backward();
}

at::Tensor expected_of(const Uses& uses) {
  at::Tensor sum = at::zeros({3});
  for (std::size_t part = 0; part < uses.size(); ++part) {
    const bool counts = uses[part] == Use::kSequence || uses[part] == Use::kWhole;
    sum += tokens_of(static_cast<std::int64_t>(part)).flatten(0, 1).sum(0).mul(counts ? 1 : 0);
  }
  return sum / static_cast<std::int64_t>(uses.size());
}

at::Tensor take_gradient(ScaleOfTokens& model) {
  at::Tensor& gradient = model.slot("weight")->persistent().mutable_grad();
  const at::Tensor taken = gradient.defined() ? full_tensor(gradient) : at::zeros({3});
  gradient.reset();
  return taken;
}

TEST_ON_MESH(PendingSums, AreCorrectIfRanksUseParametersDifferently, {2, 2}, {"dp", "tp"}) {
  for (const Use first : kUses) {
    for (const Use second : kUses) {
      ScaleOfTokens model(mesh["tp"]);
      fully_shard(model, mesh["dp"]);
      // In step 1, the ranks agree on the layout of the parameter's gradient. In later steps, the
      // ranks use the parameter in ways that give other layouts.
      for (const Uses& uses :
           {Uses{first, second}, {second, first}, {Use::kWhole, Use::kSequence}}) {
        run(model, uses, mesh.local_rank("dp"));
        EXPECT_TRUE(take_gradient(model).allclose(expected_of(uses)))
            << ::testing::PrintToString(uses) << " after "
            << ::testing::PrintToString(Uses{first, second});
      }
    }
  }
}

TEST_ON_MESH(PendingSums, AddUpOverMicroBatches, {2, 2, 2}, {"replicate", "dp", "tp"}) {
  const std::int64_t part = mesh.local_rank("replicate") * 2 + mesh.local_rank("dp");
  for (const auto& keep : {&set_requires_gradient_sync, &set_requires_all_reduce}) {
    for (const Use use : kUses) {
      const Uses first{Use::kSequence, Use::kNoTokens, use, Use::kWhole};
      const Uses second{use, Use::kSequence, Use::kUnused, use};
      ScaleOfTokens model(mesh["tp"]);
      fully_shard(model, mesh[{"replicate", "dp"}]);
      for (int step = 0; step < 2; ++step) {
        keep(model, false, true);
        run(model, first, part);
        keep(model, true, true);
        run(model, second, part);
        EXPECT_TRUE(take_gradient(model).allclose(expected_of(first) + expected_of(second)))
            << ::testing::PrintToString(first) << " and " << ::testing::PrintToString(second);
      }
    }
  }
}

TEST_ON_MESH(PendingSums, SkipCompleteGradientsAfterTheFirstStep, {2, 2}, {"dp", "tp"}) {
  ScaleOfTokens model(mesh["tp"]);
  fully_shard(model, mesh["dp"]);
  for (int step = 0; step < 3; ++step) {
    const Sent sent(rank);
    run(model, {Use::kWhole, Use::kWhole}, mesh.local_rank("dp"));
    EXPECT_EQ(sent.calls("tp", "all_reduce"), step == 0 ? 1 : 0);
    EXPECT_EQ(sent.calls("dp", "reduce_scatter"), 1);
  }
}

using Write = std::function<at::Tensor(const at::Tensor& h)>;

struct Written : nn::Module<Written> {
  at::Tensor forward(const at::Tensor& x) {
    return (*down)(at::tanh(write((*up)(x)))).square().mean();
  }
  nn::Child<nn::Linear> up{*this, "up", 8, 10}, down{*this, "down", 10, 8};
  Write write;
};

struct TwoMethods : nn::Module<TwoMethods> {
  at::Tensor forward(const at::Tensor& x) { return (*down)(encode(x)); }
  at::Tensor encode(const at::Tensor& x) { return (*up)(x) + at::ones({x.size(0), 10}); }
  nn::Child<nn::Linear> up{*this, "up", 8, 10}, down{*this, "down", 10, 8};
};

void parallelize(nn::ModuleBase& model, const DeviceMesh& mesh) {
  using namespace tensor_parallel;
  parallelize_module(model, mesh, {{"up", colwise_parallel()}, {"down", rowwise_parallel()}});
}

at::Tensor full(const at::Tensor& tensor) {
  return tessera::is_distributed(tensor) ? DistributedTensor(tensor).full_tensor() : tensor;
}

TEST(ForwardMethod, RunsUnderATensorParallelPlan) {
  const at::Tensor x = uniform_values({4, 8}, 1);
  Filled<TwoMethods> alone;
  const at::Tensor expected = alone.encode(x);
  expected.sum().backward();
  for (const int ranks : {1, 2, 4}) {
    RunOnMesh({1, ranks}, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
      for (const bool shards : {false, true}) {
        Filled<TwoMethods> model;
        parallelize(model, mesh["tp"]);
        if (shards) {
          fully_shard(model, mesh["dp"]);
        }
        const at::Tensor code = register_forward_method(model, &TwoMethods::encode)(x);
        EXPECT_TRUE(full_tensor(code).allclose(expected, 1e-4, 1e-5));
        full(code).sum().backward();
        EXPECT_TRUE(full_grad(*model.up).allclose(alone.up->weight->grad(), 1e-4, 1e-5));
      }
    });
  }
}

// A distributed tensor that a program writes into a plain tensor gets a plain gradient.
TEST(DistributedResultWrittenIntoAPlainTensor, HasTheGradientsOfOneRank) {
  const at::Tensor x = uniform_values({4, 8}, 1);
  const std::vector<Write> writes{
      [](const at::Tensor& h) { return at::zeros({4, 10}).copy_(h); },
      [](const at::Tensor& h) { return at::zeros({4, 10}).index_put_({at::arange(4)}, h); },
      [](const at::Tensor& h) {
        at::Tensor z = at::zeros({4, 10});
        for (std::int64_t i = 0; i < 4; ++i) {
          z[i] = h[i];
        }
        return z;
      }};
  for (const Write& write : writes) {
    Filled<Written> alone;
    alone.write = write;
    alone(x).backward();
    RunOnMesh({2, 2}, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
      Filled<Written> model;
      model.write = write;
      parallelize(model, mesh["tp"]);
      fully_shard(model, mesh["dp"]);
      full(model(x)).backward();
      expect_gradients(model, gradients_of(alone));
    });
  }
}

}  // namespace tessera::fsdp::two_dimensional
