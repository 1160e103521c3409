// The random numbers of a forward in models that draw on some ranks only, not in every step, or in
// other methods than forward.

#include <stdexcept>

#include "fsdp/training/random_model.h"
#include "tessera/dtensor/manual_seed.h"
#include "tessera/fsdp/forward_method.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/child.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/linear.h"
#include "testing/distributed.h"

namespace tessera::fsdp {
namespace {

using namespace drawing;

// A weight is the same on all data-parallel ranks, and so is what is dropped from it.
TEST(RandomNumbers, ForAParameterAreTheSameOnAllRanks) {
  class DropConnect : public nn::Module<DropConnect> {
   public:
    DropConnect() { weight = register_slot("weight", {6, kSequence}); }
    at::Tensor forward(const at::Tensor& x) {
      return at::linear(x, at::dropout(*weight, 0.5, true));
    }
    void reset_parameters(const nn::InitContext& init) override {
      init.fill(weight, nn::init::ones());
    }
    nn::Parameter weight;
  };
  const auto run = [](Rank& rank) {
    manual_seed(3);
    DropConnect model;
    const DeviceMesh mesh = rank.mesh({rank.size()}, {"dp"});
    fully_shard(model, mesh);
    nn::init_weights(model, 1);
    return model(at::ones({2, kSequence})).detach();
  };
  at::Tensor expected;
  RunRanks(1, [&](Rank& rank) { expected = run(rank); });
  RunRanks(2, [&](Rank& rank) { EXPECT_TRUE(at::equal(run(rank), expected)); });
}

TEST(RandomNumbers, OnReplicasAreThoseOfTheirRows) {
  const auto expected = train_alone(kModules, {6});
  RunOnMesh({2, 2}, {"replicate", "dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    DrawingModel model(kModules);
    fully_shard(model, mesh);
    nn::init_weights(model, 5);
    const at::Tensor tokens =
        token_ids(6, 0).tensor_split(4, 0)[static_cast<std::size_t>(rank.rank())];
    const at::Tensor loss = model(tokens).square().sum().div(6).detach();
    mesh.flatten().group().all_reduce(loss, ReduceOp::kSum)->wait();
    EXPECT_NEAR(loss.item<double>(), expected.loss, 1e-5 * expected.loss);
  });
}

/// Rows of one kind are dropped from, those of another are not.
class DroppingBranches : public nn::Module<DroppingBranches> {
 public:
  DroppingBranches() {
    for (const char* name : {"dropping", "plain"}) {
      branches.push_back(register_module(name, std::make_shared<nn::Linear>(kDim, kDim)));
    }
  }
  at::Tensor forward(const at::Tensor& x, std::size_t kind) {
    const at::Tensor y = (*branches[kind])(x);
    return kind == 0 ? dropped(y) : y;
  }
  std::vector<std::shared_ptr<nn::Linear>> branches;
};

// The other ranks tell their rows all the same.
TEST(RandomNumbers, MayBeDrawnBySomeRanksAlone) {
  const auto run = [](Rank& rank, std::int64_t rows, std::size_t kind) {
    manual_seed(6);
    const DeviceMesh mesh = rank.mesh({rank.size()}, {"dp"});
    DroppingBranches model;
    for (const auto& branch : model.branches) {
      fully_shard(*branch, mesh, {.may_be_unused = true});
    }
    fully_shard(model, mesh);
    nn::init_weights(model, 5);
    const at::Tensor y = model(at::ones({rows, kDim}), kind);
    y.sum().backward();
    return y.detach();
  };
  at::Tensor expected;
  RunRanks(1, [&](Rank& rank) { expected = run(rank, 4, 0); });
  RunRanks(2, [&](Rank& rank) {
    const bool draws = rank.rank() == 1;
    const at::Tensor y = run(rank, draws ? 1 : 3, draws ? 0 : 1);
    EXPECT_TRUE(!draws || y.allclose(expected.narrow(0, 3, 1)));
  });
}

/// Operators and modules.
std::vector<Draws> skipping(int quiet_forwards) {
  Draws operators = everywhere(), modules = kModules;
  for (Draws* draws : {&operators, &modules}) {
    draws->skips_empty = true;
    draws->quiet_forwards = quiet_forwards;
  }
  return {operators, modules};
}

// Such a rank tells its rows all the same, and counts what the others have drawn.
TEST(RandomNumbers, MayBeLeftOutByARankWithoutRows) {
  for (const Draws& draws : skipping(0)) {
    expect_as_alone({"dp3", {3}, {"dp"}}, draws, {1, 5, 2, 5});
    expect_as_alone({"dp2_tp2", {2, 2}, {"dp", "tp"}}, draws, {1, 5});
  }
}

// The ranks exchange nothing once two forwards have drawn nothing, until one does.
TEST(RandomNumbers, MayBeLeftOutInAModelThatBeganToDrawLate) {
  for (const Draws& draws : skipping(3)) {
    expect_as_alone({"dp3", {3}, {"dp"}}, draws, {3, 3, 3, 3, 1, 5});
  }
}

TEST(RandomNumbers, AreNotDrawnInEvaluation) {
  RunRanks(2, [](Rank& rank) {
    DrawingModel model(kModules);
    fully_shard(model, rank.mesh({2}, {"dp"}));
    nn::init_weights(model, 5);
    model.eval();
    manual_seed(1);
    model(token_ids(2, 0));
    EXPECT_EQ(random_state().calls, 0);
    EXPECT_EQ(model.blocks[0]->drop_residual->calls(), 0);
  });
}

// The region ends with the call, whatever its end.
TEST(RandomNumbers, AfterForwardAreLibtorchsAgain) {
  RunRanks(2, [](Rank& rank) {
    Draws draws;
    draws.residual = [](const at::Tensor& x) -> at::Tensor {
      return x.size(0) == 2 * kSequence ? x : throw std::runtime_error("a bad batch");
    };
    DrawingModel model(draws);
    fully_shard(model, rank.mesh({2}, {"dp"}));
    nn::init_weights(model, 5);
    manual_seed(1);
    EXPECT_THROWN(std::runtime_error, model(token_ids(1, 0)), "a bad batch");
    at::rand({4});
    model(token_ids(2, 0));
    at::rand({4});
    EXPECT_EQ(random_state().calls, 0);
  });
}

TEST(RandomNumbers, InAMethodAreThoseOfItsRows) {
  struct Encoder : nn::Module<Encoder> {
    at::Tensor forward(const at::Tensor& x) { return (*linear)(x); }
    at::Tensor encode(const at::Tensor& x) {
      TESSERA_CHECK(x.size(0) < 9, "too many rows");
      return dropped((*linear)(x));
    }
    nn::Child<nn::Linear> linear{*this, "linear", kDim, kDim};
  };
  const auto run = [](Rank& rank) {
    manual_seed(8);
    Encoder model;
    fully_shard(model, rank.mesh({rank.size()}, {"dp"}));
    nn::init_weights(model, 1);
    const auto encode = register_forward_method(model, &Encoder::encode);
    EXPECT_ERROR(encode(at::ones({9, kDim})), "too many rows");
    at::rand({3});
    EXPECT_EQ(random_state().calls, 0);
    return encode(at::ones({8 / rank.size(), kDim})).detach();
  };
  at::Tensor expected;
  RunRanks(1, [&](Rank& rank) { expected = run(rank); });
  RunRanks(2, [&](Rank& rank) {
    EXPECT_TRUE(run(rank).allclose(expected.narrow(0, 4 * rank.rank(), 4)));
  });
}

}  // namespace
}  // namespace tessera::fsdp
