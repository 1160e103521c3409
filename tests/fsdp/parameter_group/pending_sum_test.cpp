// Gradients that come in another layout on one data-parallel rank than on another: as a pending sum
// over tensor parallelism, complete, or not at all.

#include <array>

#include "fsdp/training/training.h"
#include "tessera/nn/distribute_module.h"

namespace tessera::fsdp {
namespace {

/// How a rank uses the parameter, and so how its gradient comes.
enum class Use : std::uint8_t {
  kSequence,  ///< on its part of the sequence: a pending sum
  kWhole,     ///< on all tokens: complete
  kNoTokens,  ///< zeros, in any layout
  kUnused,    ///< no gradient
};
constexpr std::array kUses{Use::kSequence, Use::kWhole, Use::kNoTokens, Use::kUnused};

class ScaleOfTokens : public nn::Module<ScaleOfTokens> {
 public:
  explicit ScaleOfTokens(const DeviceMesh& tp) : tp_(tp) {
    weight = register_slot("weight", at::ones({3}));
    nn::distribute_module(*this, tp);
  }
  /// (batch, sequence, 3).
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
  return testing::uniform_values({2, 4, 3}, seed);
}

at::Tensor gradient_of(std::int64_t seed, Use use) {
  const bool counts = use == Use::kSequence || use == Use::kWhole;
  return tokens_of(seed).flatten(0, 1).sum(0).mul(counts ? 1 : 0);
}

struct PendingSums : ::testing::Test {
  /// One backward in which data-parallel rank i uses the parameter as `uses[i]` says.
  static void run(ScaleOfTokens& model, const std::vector<Use>& uses, std::int64_t part) {
    model(tokens_of(part), uses[static_cast<std::size_t>(part)]).backward();
  }
  static at::Tensor expected(const std::vector<Use>& uses) {
    at::Tensor sum = at::zeros({3});
    for (std::size_t part = 0; part < uses.size(); ++part) {
      sum += gradient_of(static_cast<std::int64_t>(part), uses[part]);
    }
    return sum / static_cast<std::int64_t>(uses.size());
  }
  static at::Tensor taken_gradient(ScaleOfTokens& model) {
    at::Tensor& gradient = model.slot("weight")->persistent().mutable_grad();
    const at::Tensor taken = gradient.defined() ? full_tensor(gradient) : at::zeros({3});
    gradient.reset();
    return taken;
  }
};

std::string named(const std::vector<Use>& uses) {
  constexpr std::array kNames{"sequence ", "whole ", "no tokens ", "unused "};
  std::string text;
  for (const Use use : uses) {
    text += kNames[static_cast<std::size_t>(use)];
  }
  return text;
}

TEST_F(PendingSums, DoNotDependOnTheUsesOfOtherRanks) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    for (const Use first : kUses) {
      for (const Use second : kUses) {
        ScaleOfTokens model(mesh["tp"]);
        fully_shard(model, mesh["dp"]);
        // What the first step has settled holds for what comes otherwise later.
        for (const std::vector<Use>& uses :
             {std::vector{first, second}, {second, first}, {Use::kWhole, Use::kSequence}}) {
          run(model, uses, mesh.local_rank("dp"));
          EXPECT_TRUE(taken_gradient(model).allclose(expected(uses)))
              << named(uses) << "after " << named({first, second});
        }
      }
    }
  });
}

TEST_F(PendingSums, AddUpOverMicroBatches) {
  RunOnMesh({2, 2, 2}, {"replicate", "dp", "tp"}, [](const DeviceMesh& mesh) {
    const std::int64_t part = mesh.local_rank("replicate") * 2 + mesh.local_rank("dp");
    for (const auto& keep : {&set_requires_gradient_sync, &set_requires_all_reduce}) {
      for (const Use use : kUses) {
        const std::vector<Use> first{Use::kSequence, Use::kNoTokens, use, Use::kWhole};
        const std::vector<Use> second{use, Use::kSequence, Use::kUnused, use};
        ScaleOfTokens model(mesh["tp"]);
        fully_shard(model, mesh[{"replicate", "dp"}]);
        for (int step = 0; step < 2; ++step) {
          keep(model, false, true);
          run(model, first, part);
          keep(model, true, true);
          run(model, second, part);
          EXPECT_TRUE(taken_gradient(model).allclose(expected(first) + expected(second)))
              << named(first) << "and " << named(second);
        }
      }
    }
  });
}

TEST_F(PendingSums, CostNothingWhereGradientsAreComplete) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    ScaleOfTokens model(mesh["tp"]);
    fully_shard(model, mesh["dp"]);
    for (int step = 0; step < 3; ++step) {
      const comm::TrafficTable before = rank.world()->traffic().table();
      run(model, {Use::kWhole, Use::kWhole}, mesh.local_rank("dp"));
      const comm::TrafficTable traffic = rank.world()->traffic().since(before);
      // The ranks learn in the first step how gradients come.
      EXPECT_EQ(traffic_of(traffic, "tp", "all_reduce").calls, step == 0 ? 1 : 0);
      EXPECT_EQ(traffic_of(traffic, "dp", "reduce_scatter").calls, 1);
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp
