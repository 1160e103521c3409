// Tests models that draw random numbers on some ranks only, in some steps only, or in methods other
// than forward(), and random operators that are refused.

#include <stdexcept>

#include "fsdp/training/random_model.h"
#include "fsdp/training/training.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/initialization.h"
#include "tessera/tensor_parallel/parallelize.h"

namespace tessera::fsdp::random_numbers {

using drawing::DrawingModel;
using drawing::Draws;
using drawing::kModules;
using drawing::kSequence;
using drawing::token_ids;

// Data-parallel ranks have equal weights, so a weight's dropout mask must be equal on all ranks.
TEST(RandomNumbers, ForAParameterAreTheSameOnAllRanks) {
  struct DropConnect : nn::Module<DropConnect> {
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

// A rank without rows may skip random operators, but must call the collectives that compare the
// ranks' draw counts. The calls stop after two forwards without random operators.
TEST(RandomNumbers, MayBeSkippedWithoutRowsAndInFirstForwards) {
  Draws operators = drawing::everywhere(), modules = kModules;
  for (Draws* draws : {&operators, &modules}) {
    draws->skips_empty = true;
    drawing::expect_as_alone({"dp3", {3}, {"dp"}}, *draws, {1, 5, 2, 5});
    drawing::expect_as_alone({"dp2_tp2", {2, 2}, {"dp", "tp"}}, *draws, {1, 5});
    draws->quiet_forwards = 3;
    drawing::expect_as_alone({"dp3", {3}, {"dp"}}, *draws, {3, 3, 3, 3, 1, 5});
  }
}

// After a failed training forward, random operators outside of training forwards must use
// libtorch's generator, as without FSDP.
TEST_ON_MESH(RandomNumbers, OutsideOfTrainingForwardsComeFromLibtorch, {2}, {"dp"}) {
  Draws draws;
  draws.residual = [](const at::Tensor& x) -> at::Tensor {
    return x.size(0) == 2 * kSequence ? x : throw std::runtime_error("a bad batch");
  };
  DrawingModel dropping(kModules), throwing(draws);
  for (DrawingModel* model : {&dropping, &throwing}) {
    fully_shard(*model, mesh);
    nn::init_weights(*model, 5);
  }
  dropping.eval();
  manual_seed(1);
  dropping(token_ids(2, 0));
  EXPECT_EQ(dropping.blocks[0]->drop_residual->calls(), 0);
  EXPECT_THROWN(std::runtime_error, throwing(token_ids(1, 0)), "a bad batch");
  at::rand({4});
  throwing(token_ids(2, 0));
  at::rand({4});
  EXPECT_EQ(random_state().calls, 0);
}

TEST(RandomNumbers, InAForwardMethodDependOnTheRows) {
  struct Encoder : nn::Module<Encoder> {
    at::Tensor forward(const at::Tensor& x) { return (*linear)(x); }
    at::Tensor encode(const at::Tensor& x) {
      TESSERA_CHECK(x.size(0) < 9, "too many rows");
      return drawing::dropped((*linear)(x));
    }
    nn::Child<nn::Linear> linear{*this, "linear", drawing::kDim, drawing::kDim};
  };
  const auto run = [](Rank& rank) {
    manual_seed(8);
    Encoder model;
    fully_shard(model, rank.mesh({rank.size()}, {"dp"}));
    nn::init_weights(model, 1);
    const auto encode = register_forward_method(model, &Encoder::encode);
    EXPECT_ERROR(encode(at::ones({9, drawing::kDim})), "too many rows");
    at::rand({3});
    EXPECT_EQ(random_state().calls, 0);
    return encode(at::ones({8 / rank.size(), drawing::kDim})).detach();
  };
  at::Tensor expected;
  RunRanks(1, [&](Rank& rank) { expected = run(rank); });
  RunRanks(2, [&](Rank& rank) {
    EXPECT_TRUE(run(rank).allclose(expected.narrow(0, 4 * rank.rank(), 4)));
  });
}

// If a rank cannot know which random numbers to draw, all ranks throw an Error with the name of the
// operator and the remedy.

constexpr std::int64_t kSide = 8;

using Draw = std::function<at::Tensor(const at::Tensor&)>;

struct OneDraw : nn::Module<OneDraw> {
  explicit OneDraw(Draw d) : draw(std::move(d)) {}
  at::Tensor forward(const at::Tensor& x) { return draw((*linear)(x)); }
  Draw draw;
  nn::Child<nn::Linear> linear{*this, "linear", kSide, kSide};
};

std::vector<std::string> errors_of(const Draw& draw, std::int64_t rows, bool local_part = false,
                                   int ranks = 2) {
  return ErrorsOfRanks(ranks, [&](Rank& rank) {
    OneDraw model(draw);
    if (local_part) {
      tensor_parallel::parallelize_module(
          model, rank.mesh({ranks}, {"tp"}),
          {{"linear", tensor_parallel::colwise_parallel({.use_local_output = true})}});
    } else {
      fully_shard(model, rank.mesh({ranks}, {"dp"}));
    }
    nn::init_weights(model, 5);
    model(at::ones({rows, kSide}));
  });
}

at::Tensor dropout_with_batch_second(const at::Tensor& y, std::int64_t first) {
  return at::dropout(y.unsqueeze(0).expand({first, 4, kSide}), 0.4, true);
}

struct RandomRefusal {
  Draw draw;
  std::vector<std::string_view> words;
  std::int64_t rows = 2;
  bool local_part = false;
};

TEST(RandomErrors, NameTheOperatorAndTheRemedyOnEveryRank) {
  const std::vector<RandomRefusal> cases{
      {[](const at::Tensor& y) { return dropout_with_batch_second(y, 3); },
       {"bernoulli_", "[3, 4, 8]", "2 data-parallel ranks", "4 rows",
        "put the batch dimension first"},
       4},
      {[](const at::Tensor& y) { return dropout_with_batch_second(y, 8); },
       {"[8, 4, 8]", "second dimension"},
       4},
      // The random tensor has 4 rows, a multiple of the batch's 2 rows, but can be unrelated to the
      // batch.
      {[](const at::Tensor& y) { return y + at::rand({4, 1}).sum(); },
       {"uniform_", "[4, 1]", "first dimension", "BatchPart(0, 1)"}},
      // Each random number of these operators depends on earlier numbers, not only on its index.
      {[](const at::Tensor& y) { return at::poisson(y.detach().abs()); },
       {"aten::poisson", "one after another"}},
      {[](const at::Tensor& y) { return at::multinomial(y.detach().softmax(-1), 2, true); },
       {"aten::multinomial", "one after another"}},
      {[](const at::Tensor& y) { return at::normal(y.detach(), 1.0); },
       {"aten::normal.Tensor_float", "one after another"}},
      {[](const at::Tensor& y) { return y.index_select(0, at::randperm(y.size(0))); },
       {"aten::randperm.generator_out", "one after another"}},
      {[](const at::Tensor& y) { return at::rrelu(y, 0.1, 0.3, true); },
       {"aten::rrelu_with_noise", "one after another"}},
      {[](const at::Tensor& y) {
         return at::empty_like(y.detach()).normal_(0, 1, at::detail::createCPUGenerator(3));
       },
       {"aten::normal_", "generator", "manual_seed"}},
      {[](const at::Tensor& y) { return at::dropout(y, 0.4, true); },
       {"[2, 4]", "local part", "BatchPart", "ReplicationScope"},
       2,
       true},
      {[](const at::Tensor& y) { return y.mul(at::rand({2, y.size(1)})); },
       {"aten::uniform_", "[2, 4]"},
       2,
       true}};
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const RandomRefusal& c = cases[i];
    EXPECT_TRUE(testing::Contains(errors_of(c.draw, c.rows, c.local_part), c.words))
        << "case " << i;
  }
}

TEST(RandomErrors, DoNotOccurInBatchPartOrOnOneRank) {
  const auto in_scope = [](const at::Tensor& y) {
    const BatchPart part(0, 1);
    return at::dropout(y, 0.4, true);
  };
  EXPECT_EQ(errors_of(in_scope, 2, true), (std::vector<std::string>{"", ""}));
  const auto dropout = [](const at::Tensor& y) { return at::dropout(y, 0.4, true); };
  EXPECT_EQ(errors_of(dropout, 2, true, 1), std::vector<std::string>{""});
}

// A random tensor of shape {1, 1} can be for one row or for the whole batch. All ranks must throw,
// and no rank may wait for another rank.
TEST(RandomErrors, OfAmbiguousSizesReachAllRanks) {
  for (const bool of_rows : {false, true}) {
    const auto errors = ErrorsOfRanks(3, [&](Rank& rank) {
      OneDraw model(
          [&](const at::Tensor& y) { return y * at::rand({of_rows ? y.size(0) : 1, 1}); });
      fully_shard(model, rank.mesh({3}, {"dp"}));
      nn::init_weights(model, 5);
      model(at::ones({1 + rank.rank(), kSide}));
    });
    EXPECT_CONTAINS(errors, "aten::uniform_", "a rank has only 1 row", "BatchPart(0, 1)");
  }
}

}  // namespace tessera::fsdp::random_numbers
