// Units that change their arguments in place: autograd refuses, since the caller's tensor would
// have new values with its old history.

#include "fsdp/training/training.h"

namespace tessera::fsdp {
namespace {

/// What a unit does to its argument.
using Act = at::Tensor (*)(at::Tensor& x);

class Changing : public nn::Module<Changing> {
 public:
  explicit Changing(Act act) : act_(act) { bias = register_slot("bias", at::ones({kDim})); }
  at::Tensor forward(at::Tensor x) {
    const at::Tensor y = act_(x);
    return tessera::is_distributed(y) ? y : y + bias.slot()->get();
  }

  nn::Parameter bias;

 private:
  Act act_;
};

/// y + h, where y is what the unit makes of h.
class Net : public nn::Module<Net> {
 public:
  explicit Net(Act act) {
    first = register_module("first", std::make_shared<nn::Linear>(kDim, kDim));
    unit = register_module("unit", std::make_shared<Changing>(act));
    testing::fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = (*first)(x);
    const at::Tensor y = (*unit)(h);
    return y + h;
  }

  std::shared_ptr<nn::Linear> first;
  std::shared_ptr<Changing> unit;
};

/// The error of a forward on one rank of two.
std::string refusal_of(Act act) {
  const auto errors = testing::ErrorsOfRanks(2, [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2}, {"dp"});
    Net net(act);
    fully_shard(*net.unit, mesh);
    fully_shard(net, mesh);
    net(testing::batch(kDim, 0)).sum().backward();
  });
  return errors.front();
}

TEST(ChangedInputs, AreRefused) {
  const std::string error = refusal_of([](at::Tensor& x) { return x.relu_(); });
  EXPECT_CONTAINS(error, "must not change its arguments in place");
}

TEST(ChangedInputs, AreRefusedThroughViews) {
  const std::string error =
      refusal_of([](at::Tensor& x) { return x.view(-1).relu_().view(x.sizes()); });
  EXPECT_CONTAINS(error, "modified inplace");
}

TEST(ChangedInputs, AreRefusedWhereTheyAreDistributed) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    Changing unit([](at::Tensor& x) { return x.relu_(); });
    fully_shard(unit, mesh["dp"]);
    const at::Tensor leaf = distribute_tensor(testing::batch(kDim, 0), mesh["tp"], {Shard{0}});
    const at::Tensor x = leaf.detach().requires_grad_();
    try {
      unit(x.mul(1));
      ADD_FAILURE() << "no error";
    } catch (const c10::Error& error) {
      EXPECT_CONTAINS(error.what(), "must not change its arguments");
    }
  });
}

TEST(ChangedInputs, MayBeCopies) {
  const Act act = [](at::Tensor& x) { return x.clone().relu_(); };
  Net alone(act);
  alone(testing::batch(kDim, 0)).square().sum().backward();
  RunOnMesh({2}, {"dp"}, [&](const DeviceMesh& mesh) {
    Net net(act);
    fully_shard(*net.unit, mesh);
    fully_shard(net, mesh);
    net(testing::batch(kDim, 0)).square().sum().backward();
    testing::expect_gradients(
        net, {alone.first->weight->grad(), alone.first->bias->grad(), alone.unit->bias->grad()});
  });
}

TEST(ChangedInputs, MayBeThoseThatNeedNoGradient) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    Changing unit([](at::Tensor& x) { return x.relu_(); });
    fully_shard(unit, mesh);
    at::Tensor x = at::ones({2, kDim}).neg();
    unit(x).sum().backward();
    EXPECT_EQ(x.sum().item<double>(), 0.0);
    EXPECT_TRUE(
        testing::full_tensor(unit.slot("bias")->persistent().grad()).equal(at::full({kDim}, 2.0)));
    const c10::AutoGradMode no_grad(false);
    at::Tensor y = at::ones({2, kDim}).neg().requires_grad_();
    unit(y);
    EXPECT_EQ(y.sum().item<double>(), 0.0);
  });
}

/// The caller changes what it gave, and what it got back, after the unit has run.
class ChangesLater : public Net {
 public:
  ChangesLater() : Net([](at::Tensor& x) { return x + 0; }) {}
  at::Tensor run(const at::Tensor& x) {
    at::Tensor h = (*first)(x);
    at::Tensor y = (*unit)(h);
    h.mul_(3);
    return y.mul_(2) + h;
  }
};

TEST(ChangedInputs, MayBeChangedByTheCallerAfter) {
  const at::Tensor x = testing::batch(kDim, 0);
  ChangesLater alone;
  alone.run(x).square().sum().backward();
  RunRanks(2, [&](Rank& rank) {
    ChangesLater net;
    fully_shard(*net.unit, rank.mesh({2}, {"dp"}));
    net.run(x).square().sum().backward();
    EXPECT_TRUE(net.first->weight->grad().allclose(alone.first->weight->grad(), 1e-4, 1e-5));
  });
}

}  // namespace
}  // namespace tessera::fsdp
