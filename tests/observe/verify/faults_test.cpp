// verify() finds and names typical mistakes of users. The reference runs the same code on one rank.
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "testing/distributed.h"
#include "verify/gpt.h"

namespace tessera::observe {
namespace {

using namespace testing;
using LocalFunction = std::function<at::Tensor(const at::Tensor& local)>;

/// `function` of this rank's part, as a user would call it.
at::Tensor by_hand(const at::Tensor& x, const LocalFunction& function) {
  if (!tessera::is_distributed(x)) {
    return function(x);
  }
  const DistributedTensor whole(x);
  return DistributedTensor::from_local(function(whole.to_local()), whole.mesh(), whole.placements(),
                                       x.sizes().vec());
}

/// Between the projections of an MLP, where a rank has a share of the features.
GptOptions between_projections(const LocalFunction& function) {
  return {
      .inner = [function](const at::Tensor& x, const at::Tensor&) { return by_hand(x, function); }};
}

std::int64_t tp_rank_of(const at::Tensor& x) {
  return tessera::is_distributed(x) ? sharding_spec(x).mesh.local_rank() : 0;
}

/// The report on 2 tensor-parallel ranks, which is equal on both.
VerifyReport found(const GptRun& run) {
  VerifyReport report;
  RunRanks(2, [&](Rank& rank) {
    const VerifyReport own = verify_gpt(run, rank.mesh({1, 2}, {"dp", "tp"}));
    EXPECT_FALSE(own.ok());
    if (rank.rank() == 0) {
      report = own;
    }
  });
  return report;
}

/// The first module that differs is the tap of the first block.
void expect_tap_named(const VerifyReport& report) {
  ASSERT_FALSE(report.outputs.empty()) << report.text();
  EXPECT_EQ(report.outputs[0].fqn, "block0.mlp.tap");
  EXPECT_ERROR(report.check(),
               "verify: the output of 'block0.mlp.tap', [2, 6, 24] on (tp=2) as [Shard(2)], is not "
               "one rank's: at [",
               "one rank has ", "off by ", "rounding makes up to ", "on ranks 0, 1",
               "its inputs and all outputs before are equal, so look at the forward of "
               "'block0.mlp.tap'");
}

TEST(VerifyFaults, AnExplicitSliceOfAPart) {
  expect_tap_named(found({.options = between_projections([](const at::Tensor& x) {
                            return x * x.narrow(-1, 0, 1);  // the first feature, of this rank
                          })}));
}

TEST(VerifyFaults, TheItemOfAPart) {
  expect_tap_named(found({.options = between_projections([](const at::Tensor& x) {
                            return x / x.abs().max().item<double>();
                          })}));
}

TEST(VerifyFaults, AStatisticOfADetachedPart) {
  expect_tap_named(found({.options = between_projections([](const at::Tensor& x) {
                            return x - x.detach().mean(-1, /*keepdim=*/true);
                          })}));
}

TEST(VerifyFaults, ADivisorOfTheLocalSize) {
  expect_tap_named(found({.options = between_projections([](const at::Tensor& x) {
                            return x / std::sqrt(static_cast<double>(x.size(-1)));
                          })}));
}

TEST(VerifyFaults, AFusedWeightCutAlongTheWrongFeatures) {
  expect_tap_named(found({.options = between_projections([](const at::Tensor& x) {
                            const auto halves = x.chunk(2, -1);  // of the local features
                            return at::cat({halves[0] * halves[1], halves[1]}, -1);
                          })}));
}

TEST(VerifyFaults, AMemberOfTheWrongRank) {
  const at::Tensor table = at::linspace(0.5, 1.5, kGptInner);
  expect_tap_named(found({.options = between_projections([table](const at::Tensor& x) {
                            return x * table.narrow(0, 0, x.size(-1));  // on every rank
                          })}));
}

TEST(VerifyFaults, AMaskThatDependsOnTheRank) {
  const TapFunction mask = [](const at::Tensor& x, const at::Tensor&) {
    const std::int64_t rank = tp_rank_of(x);
    return by_hand(x, [rank](const at::Tensor& local) {
      return local * at::arange(local.size(-1)).add(rank).remainder(5).ne(0);
    });
  };
  const VerifyReport report = found({.options = {.embedded = mask}});
  // Rank 0 has the same values as one rank.
  EXPECT_ERROR(report.check(),
               "the output of 'tap', [2, 6, 12] on (tp=2) as [Replicate()], is not one rank's",
               ", on rank 1;");
}

/// x * gain, where x may be a part: the gradient of the gain would be summed over the ranks.
struct GainFunction : torch::autograd::Function<GainFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& gain) {
    context->save_for_backward({x, gain});
    return x * gain;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    return {grads[0] * saved[1], (grads[0] * saved[0]).sum().view({1})};
  }
};

at::Tensor times_gain(const at::Tensor& x, const at::Tensor& gain) {
  const at::Tensor own = tessera::is_distributed(gain) ? DistributedTensor(gain).to_local() : gain;
  return by_hand(x, [&](const at::Tensor& local) { return GainFunction::apply(local, own); });
}

TEST(VerifyFaults, AFunctionWhoseBackwardLacksAReduction) {
  const VerifyReport report = found({.options = {.inner = times_gain}});
  EXPECT_TRUE(report.outputs.empty()) << report.text();
  ASSERT_EQ(report.gradients.size(), 2U) << report.text();
  // Backward reaches the last block first.
  EXPECT_EQ(report.gradients[0].fqn, "block1.mlp.tap.gain");
  EXPECT_EQ(report.gradients[1].fqn, "block0.mlp.tap.gain");
  EXPECT_ERROR(report.check(),
               "verify: the gradient of parameter 'block1.mlp.tap.gain', [1] on (tp=2) as "
               "[Replicate()], is not one rank's: at [0] it is ",
               "to_local()", "Partial{}", "(0 outputs and 1 gradient more differ)");
}

TEST(VerifyFaults, ASumOfTheRanksOwnLogits) {
  const VerifyReport report = found({.step = [](Gpt& model, const at::Tensor& tokens) {
    const at::Tensor logits = model(tokens).flatten(0, 1);
    const at::Tensor own =
        tessera::is_distributed(logits) ? DistributedTensor(logits).to_local() : logits;
    const at::Tensor loss = tensor_parallel::cross_entropy(logits, tokens.flatten());
    return (tessera::is_distributed(loss) ? DistributedTensor(loss).full_tensor() : loss) +
           own.logsumexp(-1).square().mean().mul(1e-3);
  }});
  EXPECT_ERROR(report.check(), "verify: the loss, [], plain, is not one rank's",
               "look at the step: the loss");
}

TEST(VerifyFaults, AParameterWithOtherValuesOnOneRank) {
  const GptRun run{.plant = [](Gpt& model, const DeviceMesh& mesh) {
    if (mesh.local_rank("tp") == 1) {
      const c10::NoGradGuard no_grad;
      local_tensor(model.blocks[1]->second_norm->slot("weight")->get()).mul_(1.5);
    }
  }};
  EXPECT_ERROR(
      found(run).check(),
      "verify: parameter 'block1.second_norm.weight' differs from rank 0 on ranks 1, first "
      "at [0]: ",
      "give every rank the same values");
}

TEST(VerifyFaults, AParameterThatHasDriftedApartAfterTheFirstForward) {
  RunOnMesh({1, 2}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const auto model = make_gpt({}, mesh);
    gpt_loss(*model, gpt_tokens(mesh)).backward();
    if (rank.rank() == 1) {
      const c10::NoGradGuard no_grad;
      local_tensor(model->norm->slot("bias")->get()).add_(1e-3);
    }
    EXPECT_ERROR(verify_gpt(*model, {}, mesh).check(), "parameter 'norm.bias' differs from rank 0");
  });
}

/// The values are equal only on the ranks of the first part of the batch.
double rank_value(const DeviceMesh& mesh) {
  const auto part = static_cast<double>(mesh.local_rank("dp"));
  return part * static_cast<double>(10 + mesh.local_rank("tp"));
}

TEST(VerifyFaults, ABufferOfOneRank) {
  RunRanks(4, [](Rank& rank) {
    const GptRun run{.plant = [](Gpt& model, const DeviceMesh& mesh) {
      model.tap->calls->fill_(rank_value(mesh));
    }};
    EXPECT_ERROR(
        verify_gpt(run, rank.mesh({2, 2}, {"dp", "tp"})).check(),
        "verify: buffer 'tap.calls' differs from rank 2 on ranks 3, first at [0]: 10 on rank "
        "2 and 11 on rank 3");
  });
}

/// A hook on one rank that replaces the gradient.
void plant_hook(Gpt& model, const DeviceMesh& mesh) {
  if (mesh.local_rank("tp") == 1) {
    model.blocks[1]->mlp->up->add_forward_pre_hook([](nn::ModuleBase& self, nn::TensorList) {
      self.slot("weight")->get().register_hook(
          [](const at::Tensor& gradient) { return gradient.mul(0.5); });
    });
  }
}

TEST(VerifyFaults, AHookThatScalesTheGradientOfOneRank) {
  const VerifyReport report = found({.plant = plant_hook});
  EXPECT_ERROR(report.check(),
               "verify: the gradient of parameter 'block1.mlp.up.weight', [24, 12] on (tp=2) as "
               "[Shard(0)], is not one rank's",
               "a hook");
  EXPECT_TRUE(report.outputs.empty());
  EXPECT_EQ(report.gradients.size(), 1U);
}

TEST(VerifyFaults, AHookUnderFsdp) {
  RunRanks(4, [](Rank& rank) {
    const VerifyReport report = verify_gpt({.plant = plant_hook}, rank.mesh({2, 2}, {"dp", "tp"}));
    EXPECT_ERROR(report.check(), "the gradient of parameter 'block1.mlp.up.weight', [24, 12] on ",
                 "on ranks 0, 1, 2, 3");
    EXPECT_EQ(report.gradients.size(), 1U) << report.text();
  });
}

TEST(VerifyFaults, InferenceWithTheItemOfAPart) {
  GptRun run{.options = between_projections(
                 [](const at::Tensor& x) { return x / x.abs().max().item<double>(); })};
  run.step = [](Gpt& model, const at::Tensor& tokens) {
    const c10::NoGradGuard no_grad;
    return model(tokens);
  };
  const VerifyReport report = found(run);
  expect_tap_named(report);
  EXPECT_TRUE(report.gradients.empty());
}

TEST(VerifyFaults, OneDataParallelRankAlone) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    const bool wrong = mesh.local_rank("dp") == 1;
    const VerifyReport report =
        verify_gpt({.options = {.embedded =
                                    [wrong](const at::Tensor& x, const at::Tensor&) {
                                      return wrong && tessera::is_distributed(x) ? x.mul(2) : x;
                                    }}},
                   mesh);
    EXPECT_ERROR(report.check(), "the output of 'tap', ", "on ranks 2, 3;");
  });
}

TEST(VerifyFaults, CallsThatOneRankAloneMakes) {
  RunRanks(2, [](Rank& rank) {
    GptRun run;
    run.plant = [](Gpt& model, const DeviceMesh& mesh) {
      if (mesh.local_rank("tp") == 1) {
        model.norm->add_forward_hook(
            [&model](nn::ModuleBase&, nn::TensorList outputs) { (*model.tap)(*outputs[0]); });
      }
    };
    EXPECT_ERROR(verify_gpt(run, rank.mesh({1, 2}, {"dp", "tp"})),
                 "verify: on the mesh rank 0 has nothing else, but rank 1 has the output of 'tap', "
                 "call 2, [2, 6, 12] on (tp=2)",
                 "every rank make the same calls");
  });
}

/// The fault is between two children, each of which is right.
TEST(VerifyFaults, AFaultBetweenTwoModulesNamesTheirParent) {
  GptRun run;
  run.options.between = [](const at::Tensor& x) {
    return by_hand(
        x, [](const at::Tensor& local) { return local / local.abs().max().item<double>(); });
  };
  const VerifyReport report = found(run);
  EXPECT_EQ(report.outputs[0].fqn, "block0.mlp.down") << report.text();
  EXPECT_ERROR(report.check(), "the output of 'block0.mlp.down'", "its input differs already",
               "look at the forward of 'block0.mlp' before it calls 'block0.mlp.down'");
}

TEST(VerifyFaults, AFaultBeforeABlockNamesTheModelAndNotTheBlock) {
  GptRun run;
  run.step = [](Gpt& model, const at::Tensor& tokens) {
    const bool on_mesh = tessera::is_distributed(model.norm->slot("weight")->get());
    return gpt_loss(model, on_mesh ? tokens.roll(1, 0) : tokens);
  };
  EXPECT_ERROR(found(run).check(), "the output of 'embed'",
               "the input of the model differs already",
               "look at the step before it calls the model");
}

TEST(VerifyFaults, AModuleThatTheMeshNeverCalls) {
  GptRun run;
  run.options.between = [](const at::Tensor& x) { return x; };
  run.options.skips_drop = [](const at::Tensor& x) { return tessera::is_distributed(x); };
  const VerifyReport report = found(run);
  EXPECT_EQ(report.outputs[0].fqn, "block0.drop") << report.text();
  EXPECT_ERROR(report.check(), "'block0.drop'", "is never called on the mesh",
               "look at the forward of 'block0'");
}

}  // namespace
}  // namespace tessera::observe
