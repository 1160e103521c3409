// Gradients of operators that are not libtorch's, in each way of implementing one: those of one
// rank, or an error.

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <optional>
#include <tuple>

#include "dtensor/listing_mode.h"
#include "own_operators.h"
#include "tessera/dtensor/communication_scope.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using own_operators::call_binary;
using own_operators::call_unary;
using testing::values;

// One rank's result and gradients.

using Function = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

struct Outcome {
  at::Tensor result;
  std::vector<at::Tensor> gradients;
};

Outcome differentiate(const Function& function, std::vector<at::Tensor> inputs) {
  for (at::Tensor& input : inputs) {
    input = input.detach();
    input.requires_grad_();
  }
  Outcome outcome{function(inputs), {}};
  outcome.result.square().sum().backward();
  for (const at::Tensor& input : inputs) {
    outcome.gradients.push_back(input.grad());
  }
  return outcome;
}

at::Tensor whole(const at::Tensor& tensor) {
  return tensor.defined() ? DistributedTensor(tensor).full_tensor().detach() : tensor;
}

void expect_same(const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(found.defined(), expected.defined()) << what;
  if (expected.defined()) {
    EXPECT_TRUE(at::allclose(found, expected.detach())) << what << "\n" << found << expected;
  }
}

/// On every rank of a mesh of 2 × 2 the same as on one rank.
void expect_gradients_of_one_rank(const Function& function, const std::vector<at::Tensor>& inputs,
                                  const std::vector<std::vector<Placements>>& rows) {
  const Outcome expected = differentiate(function, inputs);
  RunOnMesh({2, 2}, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
    for (const std::vector<Placements>& row : rows) {
      std::vector<at::Tensor> distributed;
      std::string what;
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        distributed.push_back(distribute_tensor(inputs[i], mesh, row[i]));
        what += to_string(row[i]) + " ";
      }
      const Outcome found = differentiate(function, distributed);
      expect_same(whole(found.result), expected.result, what);
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        expect_same(whole(found.gradients[i]), expected.gradients[i],
                    what + "gradient " + std::to_string(i));
      }
    }
  });
}

const Placement kAll = Replicate{}, kRows = Shard{0}, kColumns = Shard{1}, kSum = Partial{};

class BinaryOperator : public ::testing::TestWithParam<const char*> {};

TEST_P(BinaryOperator, HasTheGradientsOfOneRank) {
  const auto call = [](const std::vector<at::Tensor>& inputs) {
    return call_binary(GetParam(), inputs[0], inputs[1]);
  };
  // Sizes that do not divide, and a weight that is broadcast over the rows.
  expect_gradients_of_one_rank(call, {values({5, 3}), values({3})},
                               {{{kRows, kAll}, {kAll, kAll}},
                                {{kAll, kRows}, {kAll, kAll}},
                                {{kRows, kColumns}, {kAll, kRows}},
                                {{kRows, kRows}, {kAll, kAll}},
                                {{kColumns, kAll}, {kAll, kAll}},
                                {{kAll, kAll}, {kAll, kAll}},
                                {{kSum, kRows}, {kAll, kSum}}});
}

INSTANTIATE_TEST_SUITE_P(OwnOperator, BinaryOperator,
                         ::testing::Values("implicit", "explicit", "explicit_with_autograd",
                                           "kernel", "kernel_without_rule"),
                         [](const auto& info) { return std::string(info.param); });

TEST(OwnOperatorGradients, AreSummedWhereTheResultIs) {
  const auto call = [](const std::vector<at::Tensor>& inputs) {
    return call_binary("product", inputs[0], inputs[1]);
  };
  expect_gradients_of_one_rank(call, {values({5, 3}), values({3, 7})},
                               {{{kColumns, kAll}, {kRows, kAll}},
                                {{kRows, kColumns}, {kAll, kRows}},
                                {{kRows, kAll}, {kAll, kColumns}},
                                {{kSum, kAll}, {kAll, kColumns}},
                                {{kSum, kSum}, {kAll, kAll}}});
}

TEST(OwnOperatorGradients, EqualThoseOfTheAutogradKernel) {
  expect_gradients_of_one_rank(
      [](const std::vector<at::Tensor>& inputs) {
        return call_unary("memory_with_autograd", inputs[0]);
      },
      {values({5, 3})}, {{{kRows, kColumns}}, {{kAll, kRows}}});
}

TEST(OwnOperatorGradients, WorkForAFunctionWithoutAnOperator) {
  expect_gradients_of_one_rank(
      [](const std::vector<at::Tensor>& inputs) { return own_operators::cube_by_hand(inputs[0]); },
      {values({5, 3})}, {{{kRows, kColumns}}, {{kSum, kAll}}});
}

// libtorch's operators in the kernel leave nothing to record: libtorch warns in backward.
TEST(OwnOperatorGradients, AreAbsentWithoutAnAutogradKernelAsOnOneRank) {
  using torch::autograd::AutogradFallbackMode;
  const auto call = [](const std::vector<at::Tensor>& inputs) {
    return call_unary("memory", inputs[0]) + inputs[0];
  };
  for (const auto mode : {AutogradFallbackMode::Warn, AutogradFallbackMode::Nothing}) {
    torch::autograd::setAutogradFallbackMode(mode);
    expect_gradients_of_one_rank(call, {values({5, 3})}, {{{kRows, kAll}}});
  }
}

TEST(OwnOperatorGradients, PassOptionalTensorsAndResultsOfIntegers) {
  const auto first = [](const std::vector<at::Tensor>& inputs) {
    const auto [result, sign] = own_operators::call<std::tuple<at::Tensor, at::Tensor>(
        const at::Tensor&, const std::optional<at::Tensor>&)>(
        "exp_and_sign", inputs[0], inputs.size() > 1 ? std::optional(inputs[1]) : std::nullopt);
    EXPECT_FALSE(sign.requires_grad());
    return result;
  };
  expect_gradients_of_one_rank(first, {values({5, 3}), values({3})},
                               {{{kRows, kAll}, {kAll, kAll}}, {{kAll, kColumns}, {kAll, kRows}}});
  expect_gradients_of_one_rank(first, {values({5, 3})}, {{{kRows, kAll}}});
}

TEST(OwnOperatorGradients, PassListsOfTensors) {
  const auto call = [](const std::vector<at::Tensor>& inputs) {
    const auto results =
        own_operators::call<std::vector<at::Tensor>(at::TensorList)>("cubes", inputs);
    return results[0] + results[1];
  };
  expect_gradients_of_one_rank(call, {values({5, 3}), values({5, 3})},
                               {{{kRows, kAll}, {kAll, kColumns}}});
}

TEST(OwnOperatorGradients, HaveGradients) {
  const auto norm_of_gradient = [](const std::vector<at::Tensor>& inputs) {
    const at::Tensor loss = call_binary("kernel", inputs[0], inputs[1]).square().sum();
    return torch::autograd::grad({loss}, inputs, {}, true, /*create_graph=*/true)[1];
  };
  expect_gradients_of_one_rank(norm_of_gradient, {values({5, 3}), values({3})},
                               {{{kRows, kColumns}, {kAll, kRows}}, {{kAll, kRows}, {kAll, kAll}}});
}

TEST(OwnOperatorGradients, SendWhatTheRuleImplies) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    at::Tensor x = distribute_tensor(values({6, 3}), mesh, {Shard{0}});
    at::Tensor w = distribute_tensor(values({3}), mesh, {Replicate{}});
    x = x.detach().requires_grad_();
    w = w.detach().requires_grad_();
    const StrictScope strict;
    const CommunicationScope communication(mesh);
    const at::Tensor result = call_binary("kernel", x, w);
    EXPECT_EQ(communication.total().calls, 0);
    EXPECT_EQ(DistributedTensor(result).placements(), Placements{Shard{0}});
    result.backward(at::ones_like(result));
    EXPECT_EQ(communication.total().calls, 1);  // the sum of the weight's gradient
  });
}

TEST(OwnOperatorGradients, ReachAPlainTensorOfOneElement) {
  const at::Tensor plain_x = values({6, 3});
  const auto gradient_of_factor = [](const at::Tensor& x) {
    at::Tensor factor = at::full({1}, 0.5, at::kDouble).requires_grad_();
    call_binary("kernel_without_rule", x, factor).square().sum().backward();
    return factor.grad();
  };
  const at::Tensor expected = gradient_of_factor(plain_x);
  RunOnMesh({2}, {"dp"}, [&](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(plain_x, mesh, {Shard{0}}).tensor().detach();
    EXPECT_ERROR(gradient_of_factor(x), "a plain number with a gradient may be another");
    const ReplicationScope same_on_every_rank;
    EXPECT_TRUE(at::allclose(gradient_of_factor(x), expected));
  });
}

TEST(OwnOperatorGradients, AreNotWantedWithoutGradMode) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    at::Tensor x = distribute_tensor(values({6, 3}), mesh, {Shard{0}});
    x = x.detach().requires_grad_();
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(call_unary("memory", x).requires_grad());
    at::Tensor copy = x.clone();
    EXPECT_TRUE(own_operators::call<at::Tensor&(at::Tensor&)>("halve_", copy).is_same(copy));
  });
}

TEST(OwnOperatorGradients, AreAnErrorWhereTheyCannotBeRecorded) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    at::Tensor x = distribute_tensor(values({6, 3}), mesh, {Shard{0}});
    x = x.detach().requires_grad_();
    at::Tensor copy = x.clone();
    EXPECT_ERROR(own_operators::call<at::Tensor&(at::Tensor&)>("halve_", copy),
                 "own_gradients::halve_", "writes to an argument", "DispatchKey::Autograd",
                 "NoGradGuard");
    EXPECT_ERROR(call_unary("first_half", x), "own_gradients::first_half", "returns a view",
                 "DispatchKey::Autograd");
    EXPECT_ERROR(call_unary("column_maximum", x), "own_gradients::column_maximum", "Partial(max)",
                 "DispatchKey::Autograd");
  });
}

// A mode may give results back later, which then would belong to an older graph.
TEST(OwnOperatorGradients, AreRecordedWithoutTheModesSeeingIt) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    at::Tensor x = distribute_tensor(values({6, 3}), mesh, {Shard{0}});
    x = x.detach().requires_grad_();
    ListingMode mode;
    {
      const OperatorModeScope scope(mode);
      EXPECT_TRUE(call_binary("kernel", x, x).requires_grad());
      EXPECT_TRUE(mode.names.empty());
      call_binary("explicit_with_autograd", x, x);
    }
    EXPECT_EQ(mode.names, std::vector<std::string>{"own_gradients::explicit_with_autograd"});
  });
}

}  // namespace
}  // namespace tessera
