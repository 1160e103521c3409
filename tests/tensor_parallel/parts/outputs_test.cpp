// What a model hands out of a part without a style that takes it.

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "tensor_parallel/parts/between_linears.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/norm.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/errors.h"
#include "testing/module_values.h"
#include "testing/ranks.h"

namespace tessera::tensor_parallel {
namespace {

using testing::fill;
using testing::uniform_values;

at::Tensor tokens_of_outputs() {
  return uniform_values({4, 6}, 0.5);
}

/// A loss, and one more of the part between two projections.
class Ends : public nn::Module<Ends> {
 public:
  explicit Ends(OfPart of_part) : of_part_(std::move(of_part)) {
    q = register_module("q", std::make_shared<nn::Linear>(6, 8));
    o = register_module("o", std::make_shared<nn::Linear>(8, 6));
    norm = register_module("norm", std::make_shared<nn::RMSNorm>(6));
    scale = register_slot("scale", at::ones({1}));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor part = (*q)(x);
    const at::Tensor main = (*norm)((*o)(part)).square().mean();
    return of_part_ ? main + of_part_(part) : main + (*scale * part).square().sum();
  }

  std::shared_ptr<nn::Linear> q, o;
  std::shared_ptr<nn::RMSNorm> norm;
  nn::Parameter scale;

 private:
  OfPart of_part_;
};

ParallelizePlan plan_of_ends() {
  return {{"q", colwise_parallel()}, {"o", rowwise_parallel()}, {"norm", leave_plain()}};
}

TEST(AnOutput, OfAPartAndAPlainParameterIsRefused) {
  RunRanks(2, [](Rank& rank) {
    Ends model(nullptr);
    parallelize_module(model, rank.mesh({2}, {"tp"}), plan_of_ends());
    EXPECT_ERROR(model(tokens_of_outputs()), "an output of the module",
                 "parameter 'scale', which the plan leaves plain", "add {\"\", sequence_parallel(");
  });
}

TEST(AnOutput, OfWhatAPartHasAlongWhatIsSplitIsRefused) {
  const auto refuses = [](const OfPart& loss, const char* message) {
    RunRanks(2, [&](Rank& rank) {
      Ends model(loss);
      parallelize_module(model, rank.mesh({2}, {"tp"}), plan_of_ends());
      for (int again = 0; again < 2; ++again) {
        EXPECT_ERROR(model(tokens_of_outputs()),
                     "an output of the module that the plan was applied to", message,
                     "have 'q' hand out a distributed tensor");
      }
    });
  };
  refuses([](const at::Tensor& x) { return x.square().mean(); },
          "mean computed along dimension 1 of [4, 4], of which each rank has a share");
  refuses([](const at::Tensor& x) { return x.abs().amax(); }, "amax computed along");
  refuses([](const at::Tensor& x) { return x.std(); }, "std computed along");
  refuses([](const at::Tensor& x) { return x.square().sum(); }, "sum computed along");
}

TEST(AnOutput, OfNoPartMayMeetPlainParameters) {
  RunRanks(2, [](Rank& rank) {
    Ends model([](const at::Tensor&) { return at::zeros({}); });
    parallelize_module(model, rank.mesh({2}, {"tp"}), plan_of_ends());
    model(tokens_of_outputs()).backward();
    EXPECT_TRUE(model.norm->weight->grad().defined());
  });
}

/// Hands out what its last projection does.
std::shared_ptr<nn::Sequential> two_projections() {
  auto model = std::make_shared<nn::Sequential>(std::make_shared<nn::Linear>(6, 8),
                                                std::make_shared<nn::Linear>(8, 6));
  fill(*model);
  return model;
}

ParallelizePlan plan_of_projections(const ColwiseOptions& last) {
  return {{"0", colwise_parallel({.output_layouts = Replicate{}})}, {"1", colwise_parallel(last)}};
}

TEST(AnOutput, ThatIsAPlainPartIsRefused) {
  RunRanks(2, [](Rank& rank) {
    const auto model = two_projections();
    ParallelizePlan plan = plan_of_projections({});
    plan.emplace_back("", leave_plain());  // which says nothing of what is handed out
    parallelize_module(*model, rank.mesh({2}, {"tp"}), plan);
    EXPECT_ERROR((*model)(tokens_of_outputs()),
                 "the model hands out a plain tensor, [4, 3], that is one rank's part",
                 ".output_layouts = Replicate{}", ".use_local_output = false");
  });
}

TEST(AnOutput, ThatSaysWhatIsSplitIsRight) {
  RunRanks(2, [](Rank& rank) {
    const auto model = two_projections();
    parallelize_module(*model, rank.mesh({2}, {"tp"}),
                       plan_of_projections({.use_local_output = false}));
    EXPECT_EQ((*model)(tokens_of_outputs()).size(1), 6);
  });
}

// The module around it may know what to do with its part.
TEST(AnOutput, ThatIsAPlainPartMayGoToAModuleAround) {
  RunRanks(2, [](Rank& rank) {
    const auto model = two_projections();
    parallelize_module(*model, rank.mesh({2}, {"tp"}), plan_of_projections({}));
    nn::Sequential around(model);
    EXPECT_EQ(around(tokens_of_outputs()).size(1), 3);
  });
}

class WarningsOfParts final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("is looked at only with gradients") != std::string::npos) {
      ++count;
    }
  }
  int count = 0;
};

TEST(AForwardWithoutGradients, SaysOnceThatNothingIsLookedAt) {
  RunRanks(2, [](Rank& rank) {
    WarningsOfParts warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    for (const bool seen_before : {false, true}) {
      BetweenLinears model([](const at::Tensor& x) { return at::relu(x); }, 24);
      fill(model);
      parallelize_module(model, rank.mesh({2}, {"tp"}),
                         {{"into", colwise_parallel()}, {"out_of", rowwise_parallel()}});
      if (seen_before) {
        model(tokens_of_outputs());
      }
      const c10::NoGradGuard none;
      model(tokens_of_outputs());
      model(tokens_of_outputs());
      EXPECT_EQ(warnings.count, 1);
    }
  });
}

}  // namespace
}  // namespace tessera::tensor_parallel
