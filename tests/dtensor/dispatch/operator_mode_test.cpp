#include "tessera/dtensor/operator_mode.h"

#include "testing/distributed.h"

namespace tessera {
namespace {

/// Lists what it sees; answers negatives with zeros.
class Listing : public OperatorMode {
 public:
  Results call(const Operator& op, const std::function<Results()>& run) override {
    names.push_back(op.name);
    if (op.draws_random) {
      ++random;
    }
    Results results = run();
    if (op.name == "aten::neg") {
      results[0] = at::Tensor(results[0].toTensor().mul(0));
    }
    return results;
  }
  std::vector<std::string> names;
  int random = 0;
};

TEST(OperatorMode, SeesOperatorsThatMakeTensorsOfTensors) {
  Listing mode;
  const at::Tensor x = at::ones({2, 2});
  {
    const OperatorModeScope scope(mode);
    at::zeros({2}).add_(x.mm(x).view(-1)[0]);
    at::native_dropout(x, 0.5, true);
  }
  x.exp();
  EXPECT_EQ(mode.names, (std::vector<std::string>{"aten::mm", "aten::native_dropout"}));
  EXPECT_EQ(mode.random, 1);
}

TEST(OperatorMode, IsBelowAutogradAndMayReplaceResults) {
  Listing mode;
  const at::Tensor x = at::ones({3}).requires_grad_();
  const OperatorModeScope scope(mode);
  const at::Tensor y = x.neg();
  y.sum().backward();
  EXPECT_TRUE(at::equal(y, at::zeros({3})));
  EXPECT_TRUE(at::equal(x.grad(), at::zeros({3})));  // backward's neg, too
}

TEST(OperatorMode, PausesAndGivesWayToAnother) {
  Listing outer, inner;
  const at::Tensor x = at::ones({3});
  const OperatorModeScope scope(outer);
  {
    const OperatorModeScope other(inner);
    x.exp();
    const OperatorModePause pause;
    x.sin();
  }
  x.cos();
  EXPECT_EQ(inner.names, (std::vector<std::string>{"aten::exp"}));
  EXPECT_EQ(outer.names, (std::vector<std::string>{"aten::cos"}));
}

TEST(OperatorMode, SeesDistributedOperatorsAndRedistributionsOnce) {
  RunRanks(2, [](Rank& rank) {
    Listing mode;
    const DistributedTensor x =
        distribute_tensor(at::ones({3, 4}), rank.mesh({2}, {"x"}), {Shard{0}});
    const OperatorModeScope scope(mode);
    const at::Tensor whole = x.tensor().add(x.tensor()).exp();
    DistributedTensor(whole).redistribute({Replicate{}});
    EXPECT_EQ(mode.names,
              (std::vector<std::string>{"aten::add.Tensor", "aten::exp", "tessera::redistribute"}));
  });
}

}  // namespace
}  // namespace tessera
