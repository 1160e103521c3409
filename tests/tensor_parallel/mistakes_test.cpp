// Errors name the missing part of a plan or a call, and the remedy.

#include <torch/nn/modules/linear.h>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/child.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/hooked.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/norm.h"
#include "tessera/optim/adamw.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::tensor_parallel {
namespace {

using testing::fill;

/// Two projections with a learnt scale and a norm in between.
struct ScaledMlp : nn::Module<ScaledMlp> {
  ScaledMlp() {
    scale = register_slot("scale", at::ones({1}));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return (*down)((*norm)((*up)(x) * *scale)); }

  nn::Child<nn::Linear> up{*this, "up", 4, 6};
  nn::Child<nn::LayerNorm> norm{*this, "norm", 6};
  nn::Child<nn::Linear> down{*this, "down", 6, 4};
  nn::Parameter scale;
};

TEST(Mistakes, ForwardInsteadOfTheCall) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    const at::Tensor plain = at::ones({3, 4});
    ScaledMlp model, sharded;
    parallelize_module(model, mesh["tp"], {{"up", colwise_parallel()}});
    EXPECT_ERROR(model.up->forward(plain), "has hooks", "(*m)(x)");
    // As a forward of the user's own class, which cannot know that the hooks have not run.
    EXPECT_ERROR(at::linear(plain, *model.up->weight), "argument 0, [3, 4], is plain",
                 "'up.weight', [", "m->forward(x)", "fsdp::register_forward_method", "plan");
    parallelize_module(sharded, mesh["tp"], {{"up", colwise_parallel()}});
    fsdp::fully_shard(sharded, mesh["dp"]);
    const at::Tensor x = distribute_tensor(plain, mesh["tp"], {Replicate{}});
    EXPECT_ERROR(at::linear(x, *sharded.up->weight), "different meshes", "'up.weight'",
                 "m->forward(x)");
  });
}

TEST(Mistakes, APlanOfAPartOfTheModelOrFsdpOnItsMesh) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    ScaledMlp model;
    parallelize_module(*model.up, mesh, {{"", colwise_parallel()}});
    EXPECT_ERROR(model(at::ones({3, 4})), "'scale', [1]", "plain", "parallelize_module");
    parallelize_module(model, mesh, {});
    EXPECT_NO_THROW(model(at::ones({3, 4})));
    EXPECT_ERROR(fsdp::fully_shard(model, mesh), "(tp=2)", "by parallelize_module");
  });
}

/// Has a libtorch parameter that is in no slot.
struct HalfSlotted : nn::Module<HalfSlotted> {
  HalfSlotted() { register_parameter("stray", at::ones({2})); }
  at::Tensor forward(const at::Tensor& x) { return (*up)(x); }
  nn::Child<nn::Linear> up{*this, "up", 4, 6};
};

TEST(Mistakes, AParameterWithoutASlot) {
  RunOnMesh({1, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    nn::Sequential model(std::make_shared<HalfSlotted>());
    EXPECT_ERROR(parallelize_module(model, mesh["tp"], {{"0.up", colwise_parallel()}}),
                 "parameter '0.stray'", "register_slot");
    EXPECT_ERROR(fsdp::fully_shard(model, mesh["dp"]), "parameter '0.stray'");
    EXPECT_ERROR(optim::Sgd(model, {.lr = 0.1}), "parameter '0.stray'");
    EXPECT_FALSE(tessera::is_distributed(model.named_children()["0"]->parameters()[0]));
  });
}

// The errors of a strict scope if a plan lacks an entry.

/// (tokens, dim) -> the same. `normed_result`: through a norm, else with a residual.
struct NormedMlp : nn::Module<NormedMlp> {
  explicit NormedMlp(bool normed_result) : normed(normed_result) { testing::fill(*this); }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = (*fc2)(at::gelu((*fc1)(x)));
    return normed ? (*norm)(y) : x + y;
  }
  bool normed;
  nn::Child<nn::LayerNorm> norm{*this, "norm", 4};
  nn::Child<nn::Linear> fc1{*this, "fc1", 4, 6}, fc2{*this, "fc2", 6, 4};
};

TEST(StrictScopeHints, NameTheEntryThatThePlanForgot) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    const at::Tensor x = at::ones({6, 4});
    for (const bool in_forward : {false, true}) {
      NormedMlp model(in_forward);
      parallelize_module(model, mesh, {{"fc1", colwise_parallel()}});
      const StrictScope strict;
      EXPECT_ERROR(model(x).square(), "[Partial(sum)] -> [Replicate()]", "rowwise_parallel()");
    }
    // Without an entry for the norm, which needs all features of a token.
    NormedMlp model(/*normed_result=*/true);
    parallelize_module(model, mesh, {{"fc2", colwise_parallel()}});
    const StrictScope strict;
    EXPECT_ERROR(model(x), "[Shard(1)] -> [Replicate()]", "prepare_module_input");
  });
}

TEST(StrictScopeHints, NameNoPlanForATensorOutsideOfIt) {
  RunRanks(2, [](Rank& rank) {
    const auto x = distribute_tensor(at::ones({4, 4}), rank.mesh({2}, {"tp"}), {Shard{0}});
    const StrictScope strict;
    const std::string message = testing::message_of([&] { x.tensor().cumsum(0); });
    EXPECT_TRUE(message.ends_with("redistribute them explicitly first")) << message;
  });
}

}  // namespace
}  // namespace tessera::tensor_parallel
