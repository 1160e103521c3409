// Random operators are refused where one rank's draws are not known: on all ranks, by
// name and with what to do.

#include "tessera/dtensor/local_map.h"
#include "tessera/dtensor/manual_seed.h"
#include "tessera/dtensor/random.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/child.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/linear.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"

namespace tessera::fsdp {
namespace {

constexpr std::int64_t kSide = 8;

using Draw = std::function<at::Tensor(const at::Tensor&)>;

struct OneDraw : nn::Module<OneDraw> {
  explicit OneDraw(Draw d) : draw(std::move(d)) {}
  at::Tensor forward(const at::Tensor& x) { return draw((*linear)(x)); }
  Draw draw;
  nn::Child<nn::Linear> linear{*this, "linear", kSide, kSide};
};

std::vector<std::string> errors_of(const Draw& draw, const at::Tensor& x) {
  return testing::ErrorsOfRanks(2, [&](Rank& rank) {
    OneDraw model(draw);
    fully_shard(model, rank.mesh({2}, {"dp"}));
    nn::init_weights(model, 5);
    model(x);
  });
}

TEST(RandomRefusals, WhereTheBatchIsNotFirst) {
  const at::Tensor x = at::ones({4, kSide});
  for (const auto& error : errors_of(
           [](const at::Tensor& y) {
             return at::dropout(y.unsqueeze(0).expand({3, 4, kSide}), 0.4, true);
           },
           x)) {
    EXPECT_CONTAINS(error, "aten::bernoulli_.float draws for [3, 4, 8]", "2 data-parallel ranks",
                    "this one has 4 rows", "is not a multiple of that", "put the batch first");
  }
  for (const auto& error : errors_of(
           [](const at::Tensor& y) {
             return at::dropout(y.unsqueeze(0).expand({8, 4, kSide}), 0.4, true);
           },
           x)) {
    EXPECT_CONTAINS(error, "draws for [8, 4, 8]", "its second dimension may be the batch");
  }
}

TEST(RandomRefusals, WhereRowsMayBeAnything) {
  const at::Tensor x = at::ones({2, kSide});
  for (const auto& error :
       errors_of([](const at::Tensor& y) { return y + at::rand({4, 1}).sum(); }, x)) {
    EXPECT_CONTAINS(error, "aten::uniform_ draws for [4, 1]",
                    "its first dimension may be that or another", "BatchPart(0, 1)");
  }
}

// On the rank with one row, {1, 1} may be one number for its row or one for all. The other ranks
// refuse what is the one or the other there, and none waits for another.
TEST(RandomRefusals, DrawsBySizeFailOnAllRanksIfOneHasASingleRow) {
  for (const bool of_rows : {false, true}) {
    const auto errors = testing::ErrorsOfRanks(3, [&](Rank& rank) {
      OneDraw model(
          [&](const at::Tensor& y) { return y * at::rand({of_rows ? y.size(0) : 1, 1}); });
      fully_shard(model, rank.mesh({3}, {"dp"}));
      nn::init_weights(model, 5);
      model(at::ones({1 + rank.rank(), kSide}));
    });
    EXPECT_CONTAINS(errors, "aten::uniform_ draws for [", "a rank has just one", "BatchPart(0, 1)");
  }
}

TEST(RandomRefusals, AreNoneInAScopeThatSaysWhatRowsAre) {
  std::vector<at::Tensor> found(2);
  RunRanks(2, [&](Rank& rank) {
    manual_seed(4);
    at::Tensor drawn;
    OneDraw model([&](const at::Tensor& y) {
      const BatchPart whole(0, 1);
      drawn = at::rand({4, 1});
      return y;
    });
    fully_shard(model, rank.mesh({2}, {"dp"}));
    nn::init_weights(model, 5);
    model(at::ones({2, kSide}));
    found[static_cast<std::size_t>(rank.rank())] = drawn;
  });
  EXPECT_TRUE(at::equal(found[0], found[1]));
}

TEST(RandomRefusals, NumbersDrawnInOrderNameTheOperator) {
  const at::Tensor x = at::ones({2, kSide});
  const std::vector<std::pair<const char*, Draw>> cases{
      {"aten::poisson", [](const at::Tensor& y) { return at::poisson(y.detach().abs()); }},
      {"aten::multinomial",
       [](const at::Tensor& y) { return at::multinomial(y.detach().softmax(-1), 2, true); }},
      {"aten::normal.Tensor_float",
       [](const at::Tensor& y) { return at::normal(y.detach(), 1.0); }},
      {"aten::randperm.generator_out",
       [](const at::Tensor& y) { return y.index_select(0, at::randperm(y.size(0))); }},
      {"aten::rrelu_with_noise", [](const at::Tensor& y) { return at::rrelu(y, 0.1, 0.3, true); }}};
  for (const auto& [name, draw] : cases) {
    for (const auto& error : errors_of(draw, x)) {
      EXPECT_CONTAINS(error, name, "draws its numbers one after another");
    }
  }
}

TEST(RandomRefusals, AGeneratorForBatchParts) {
  const auto errors = errors_of(
      [](const at::Tensor& y) {
        return at::empty_like(y.detach()).normal_(0, 1, at::detail::createCPUGenerator(3));
      },
      at::ones({2, kSide}));
  EXPECT_CONTAINS(errors, "aten::normal_ was given a generator", "manual_seed");
}

tensor_parallel::ParallelizePlan hands_out_parts() {
  return {{"linear", tensor_parallel::colwise_parallel({.use_local_output = true})}};
}

std::vector<std::string> errors_of_parts(const std::function<at::Tensor(const at::Tensor&)>& draw) {
  return testing::ErrorsOfRanks(2, [&](Rank& rank) {
    OneDraw model(draw);
    tensor_parallel::parallelize_module(model, rank.mesh({2}, {"tp"}), hands_out_parts());
    nn::init_weights(model, 5);
    model(at::ones({2, kSide}));
  });
}

TEST(RandomRefusals, ALocalPartThatAModuleReturns) {
  for (const auto& error :
       errors_of_parts([](const at::Tensor& y) { return at::dropout(y, 0.4, true); })) {
    EXPECT_CONTAINS(error,
                    "draws for a plain tensor [2, 4] after a distributed one has handed out "
                    "its local part",
                    "keep the tensor distributed", "BatchPart", "ReplicationScope");
  }
  for (const auto& error :
       errors_of_parts([](const at::Tensor& y) { return y.mul(at::rand({2, y.size(1)})); })) {
    EXPECT_CONTAINS(error, "aten::uniform_ draws for a plain tensor [2, 4]");
  }
}

TEST(RandomRefusals, NoneWhereAScopeSaysWhichPartItIs) {
  for (const auto& error : errors_of_parts([](const at::Tensor& y) {
         const BatchPart part(0, 1);
         return at::dropout(y, 0.4, true);
       })) {
    EXPECT_EQ(error, "");
  }
}

TEST(RandomRefusals, NoneBehindALocalMap) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    OneDraw model([&](const at::Tensor& y) {
      const auto twice = [](const std::vector<at::Tensor>& locals) {
        return std::vector{locals[0] * 2};
      };
      const at::Tensor doubled =
          local_map(twice, {y}, mesh, {{Shard{1}}}, {.out_sizes = {y.sizes().vec()}}).front();
      return at::dropout(doubled, 0.4, true).mul(at::rand({2, y.size(1)}));
    });
    tensor_parallel::parallelize_module(model, mesh,
                                        {{"linear", tensor_parallel::colwise_parallel()}});
    nn::init_weights(model, 5);
    EXPECT_EQ(model(at::ones({2, kSide})).size(1), kSide);
  });
}

// A part of what one rank has is all of it.
TEST(RandomRefusals, AreNotOnAMeshOfOneRank) {
  RunRanks(1, [](Rank& rank) {
    OneDraw model([](const at::Tensor& y) { return at::dropout(y, 0.4, true); });
    nn::init_weights(model, 5);
    tensor_parallel::parallelize_module(model, rank.mesh({1}, {"tp"}), hands_out_parts());
    const c10::NoGradGuard none;
    EXPECT_EQ(model(at::ones({2, kSide})).size(1), kSide);
  });
}

}  // namespace
}  // namespace tessera::fsdp
