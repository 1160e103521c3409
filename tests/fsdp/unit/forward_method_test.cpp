#include "tessera/fsdp/forward_method.h"

#include "fsdp/training/training.h"

namespace tessera::fsdp {
namespace {

/// A model that is used in two ways.
struct Coder : nn::Module<Coder> {
  at::Tensor forward(const at::Tensor& x) { return (*out)(encode(x)); }
  at::Tensor encode(const at::Tensor& x) { return (*in)(x).relu(); }
  void look() { seen = in->weight->sizes().vec(); }

  nn::Child<nn::Linear> in{*this, "in", 3, 5}, out{*this, "out", 5, 3};
  std::vector<std::int64_t> seen;
};

TEST(ForwardMethod, GathersAndReducesAsForwardDoes) {
  const at::Tensor x = testing::uniform_values({6, 3}, 1);
  Filled<Coder> alone;
  alone.encode(x).sum().backward();
  for (const int ranks : {1, 2, 4}) {
    RunRanks(ranks, [&](Rank& rank) {
      Filled<Coder> model;
      fully_shard(model, rank.mesh({rank.size()}, {"dp"}));
      const auto encode = register_forward_method(model, &Coder::encode);
      const at::Tensor code = encode(x);
      EXPECT_TRUE(code.allclose(alone.encode(x)));
      code.sum().backward();
      EXPECT_TRUE(full_tensor(model.in->slot("weight")->persistent().grad())
                      .allclose(alone.in->weight->grad()));
      EXPECT_TRUE(tessera::is_distributed(model.in->weight));
    });
  }
}

TEST(ForwardMethod, MayReturnNothing) {
  RunRanks(2, [](Rank& rank) {
    Filled<Coder> model;
    fully_shard(model, rank.mesh({2}, {"dp"}));
    register_forward_method(model, &Coder::look)();
    EXPECT_EQ(model.seen, (std::vector<std::int64_t>{5, 3}));
    EXPECT_TRUE(tessera::is_distributed(model.in->weight));
  });
}

TEST(ForwardMethod, JustCallsTheMethodOfAModuleThatIsNoUnit) {
  Filled<Coder> model;
  const at::Tensor x = testing::uniform_values({2, 3}, 1);
  EXPECT_TRUE(register_forward_method(model, &Coder::encode)(x).equal(model.encode(x)));
}

TEST(ForwardMethod, RefusesANullMethod) {
  Coder model;
  at::Tensor (Coder::*missing)(const at::Tensor&) = nullptr;
  EXPECT_ERROR(register_forward_method(model, missing), "is null; pass a method");
}

TEST(UnshardScope, GathersForAsLongAsItLives) {
  RunRanks(2, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 5);
    fully_shard(linear, rank.mesh({2}, {"dp"}));
    {
      const UnshardScope outer(linear);
      { const UnshardScope inner(linear); }
      EXPECT_FALSE(tessera::is_distributed(linear.weight));
    }
    EXPECT_TRUE(tessera::is_distributed(linear.weight));
  });
}

TEST(Unshard, DoesNothingTheSecondTime) {
  RunRanks(2, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 5);
    const at::Tensor before = linear.weight->detach().clone();
    fully_shard(linear, rank.mesh({2}, {"dp"}));
    const comm::TrafficTable table = rank.world()->traffic().table();
    UnshardHandle handle = start_unshard(linear);
    start_unshard(linear);
    handle.wait();
    handle.wait();
    unshard(linear);
    EXPECT_EQ(total(rank.world()->traffic().since(table)).calls, 1);
    EXPECT_TRUE(linear.weight->detach().equal(before));
    reshard(linear);
    reshard(linear);
    EXPECT_TRUE(tessera::is_distributed(linear.weight));
  });
}

TEST(Unshard, SurvivesItsModule) {
  RunRanks(2, [](Rank& rank) {
    auto linear = std::make_shared<nn::Linear>(3, 5);
    testing::fill(*linear);
    fully_shard(*linear, rank.mesh({2}, {"dp"}));
    UnshardHandle handle = start_unshard(*linear);
    reshard(*linear);
    linear.reset();
    EXPECT_NO_THROW(handle.wait());
  });
}

}  // namespace
}  // namespace tessera::fsdp
