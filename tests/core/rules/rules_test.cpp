// Compares every sharding rule, called through the dispatcher with arguments in random layouts,
// with libtorch's operator on whole tensors.
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdlib>
#include <random>

#include "rule_cases.h"
#include "tessera/core/detail/rule_functions.h"
#include "tessera/dtensor/detail/make_distributed.h"
#include "tessera/kernels/detail/tensors_in_values.h"
#include "testing/distributed.h"
#include "testing/layouts.h"

namespace tessera::testing {
namespace {

using Tensors = std::vector<at::Tensor>;
using Values = std::vector<c10::IValue>;

/// Distributes `whole` in a random layout. Integers and booleans never become Partial. Layouts have
/// at most one Partial reduction, because the order of different reductions changes the value.
at::Tensor spread(const at::Tensor& whole, const DeviceMesh& mesh, std::mt19937& engine) {
  static const std::vector<ReduceOp> kOps{ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax,
                                          ReduceOp::kMin};
  std::vector<ReduceOp> ops;
  if (whole.is_floating_point()) {
    ops.push_back(kOps[engine() % kOps.size()]);
  }
  const auto sizes = whole.sizes().vec();
  const LayoutPtr layout = random_layout(engine, mesh.shape().sizes(), sizes, ops);
  return make_distributed(local_part(whole, mesh, *layout).clone(), ShardingSpec{mesh, layout},
                          sizes);
}

/// Returns the results and the arguments of the call: an in-place operator changes arguments.
Tensors run(const RuleCase& rule_case, Values arguments) {
  const auto dot = rule_case.op.find('.');
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      rule_case.op.substr(0, dot).c_str(),
      dot == std::string::npos ? "" : rule_case.op.substr(dot + 1).c_str());
  Values stack = arguments;
  op.callBoxed(stack);
  Tensors found;
  stack.insert(stack.end(), arguments.begin(), arguments.end());
  kernels::visit_tensors(stack, [&](const at::Tensor& tensor) { found.push_back(tensor); });
  return found;
}

double tolerance_of(const Tensors& tensors) {
  const auto single = [](const at::Tensor& tensor) { return tensor.scalar_type() == at::kFloat; };
  return std::ranges::any_of(tensors, single) ? 1e-5 : 1e-9;
}

bool agree(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  const auto type = a.is_complex() ? at::kComplexDouble : at::kDouble;
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         at::allclose(a.to(type), b.to(type), tolerance, tolerance, true);
}

/// Calls the operator of `rule_case` on tensors in random layouts. Returns an error message, or "".
std::string problem_of(const RuleCase& rule_case, const Tensors& expected, const DeviceMesh& mesh,
                       std::mt19937& engine) {
  std::string how;
  Values arguments = rule_case.arguments();
  for (c10::IValue& value : arguments) {
    value = kernels::with_tensors(value, [&](const at::Tensor& tensor) {
      const at::Tensor distributed = spread(tensor, mesh, engine);
      how += " " + to_string(*DistributedTensor(distributed).layout());
      return distributed;
    });
  }
  try {
    const Tensors found = run(rule_case, std::move(arguments));
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const at::Tensor whole = full_tensor(found.at(i));
      if (!agree(whole, expected[i], tolerance_of(expected))) {
        return detail::concat(rule_case.op, " with", how, ": tensor ", i, "\n", whole,
                              "\nexpected\n", expected[i]);
      }
    }
  } catch (const std::exception& error) {
    return detail::concat(rule_case.op, " with", how, ": ", error.what());
  }
  return "";
}

/// Returns the number of random layouts for each case; TESSERA_RULE_DRAWS=1000 is thorough.
int draws() {
  const char* text = std::getenv("TESSERA_RULE_DRAWS");
  return text ? std::atoi(text) : 12;
}

class Rules : public ::testing::TestWithParam<std::vector<std::int64_t>> {
 protected:
  void expect_right(const std::vector<RuleCase>& cases) {
    for (const RuleCase& rule_case : cases) {
      EXPECT_TRUE(find_rule(rule_case.op) || rule_case.op.starts_with("aten::_foreach_"))
          << rule_case.op;
      const Tensors expected = run(rule_case, rule_case.arguments());
      RunOnMesh(GetParam(), {}, [&](const DeviceMesh& mesh) {
        std::mt19937 engine(7);
        std::string problem;
        for (int i = 0; i < draws() && problem.empty(); ++i) {
          problem = problem_of(rule_case, expected, mesh, engine);
        }
        EXPECT_EQ(problem, "");
      });
    }
  }
};

TEST_P(Rules, Pointwise) {
  expect_right(pointwise_cases());
}
TEST_P(Rules, Reductions) {
  expect_right(reduction_cases());
}
TEST_P(Rules, Views) {
  expect_right(view_cases());
}
TEST_P(Rules, Indexing) {
  expect_right(indexing_cases());
}
TEST_P(Rules, Networks) {
  expect_right(network_cases());
}
TEST_P(Rules, Fused) {
  expect_right(fused_cases());
}
TEST_P(Rules, Lists) {
  expect_right(list_cases());
}

// The meshes are 2 ranks, 4 ranks (which make some shards empty) and 2 x 2 ranks (FSDP over TP).
INSTANTIATE_TEST_SUITE_P(Meshes, Rules,
                         ::testing::Values(std::vector<std::int64_t>{2},
                                           std::vector<std::int64_t>{4},
                                           std::vector<std::int64_t>{2, 2}));

}  // namespace
}  // namespace tessera::testing
