// What a strict scope says of a plan that forgets an entry.

#include "tessera/nn/child.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/norm.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::tensor_parallel {
namespace {
namespace hints {

/// (tokens, dim) -> the same, through a norm or not.
struct Mlp : nn::Module<Mlp> {
  explicit Mlp(bool normed_result) : normed(normed_result) { testing::fill(*this); }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = (*fc2)(at::gelu((*fc1)(x)));
    return normed ? (*norm)(y) : x + y;
  }
  bool normed;
  nn::Child<nn::LayerNorm> norm{*this, "norm", 4};
  nn::Child<nn::Linear> fc1{*this, "fc1", 4, 6}, fc2{*this, "fc2", 6, 4};
};

TEST(Hints, NameARowwiseLinearThatThePlanForgot) {
  RunRanks(2, [](Rank& rank) {
    for (const bool in_forward : {false, true}) {
      Mlp model(in_forward);
      parallelize_module(model, rank.mesh({2}, {"tp"}), {{"fc1", colwise_parallel()}});
      const StrictScope strict;
      EXPECT_ERROR(model(at::ones({6, 4})).square(), "[Partial(sum)] -> [Replicate()]",
                   "give the Linear that left the pending sum", "rowwise_parallel()");
    }
  });
}

TEST(Hints, NameAnInputThatAModuleNeedsWhole) {
  RunRanks(2, [](Rank& rank) {
    // Without an entry for the norm, which needs all features of a token.
    Mlp model(/*normed_result=*/true);
    parallelize_module(model, rank.mesh({2}, {"tp"}), {{"fc2", colwise_parallel()}});
    const StrictScope strict;
    EXPECT_ERROR(model(at::ones({6, 4})), "[Shard(1)] -> [Replicate()]",
                 "in the plan where the module is called (prepare_module_input)");
  });
}

TEST(Hints, NameNoPlanForATensorOutsideOfIt) {
  RunRanks(2, [](Rank& rank) {
    const auto x = distribute_tensor(at::ones({4, 4}), rank.mesh({2}, {"tp"}), {Shard{0}});
    const StrictScope strict;
    const std::string message = testing::message_of([&] { x.tensor().cumsum(0); });
    EXPECT_TRUE(message.ends_with("redistribute them explicitly first")) << message;
  });
}

}  // namespace hints
}  // namespace
}  // namespace tessera::tensor_parallel
