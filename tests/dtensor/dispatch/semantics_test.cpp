#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <ostream>
#include <set>

#include "dtensor/listing_mode.h"
#include "plan/call_plan.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "testing/distributed.h"

namespace tessera {

// Tests distributed tensors in inference mode, in second derivatives and in operator modes, and
// autograd between distributed and plain tensors.

namespace {

using testing::full_tensor;
using testing::values;

at::Tensor split(const at::Tensor& value, Rank& rank, const Placement& placement = Shard{0}) {
  const auto mesh = rank.mesh({rank.size()}, {"x"});
  return distribute_tensor(value, mesh, {placement}).tensor().detach();
}

TEST_ON_RANKS(InferenceMode, RunsCompositeViewAndInPlaceOperators, 2) {
  const auto outside = split(values({5, 4}), rank);
  const c10::InferenceMode inference;
  const auto x = split(values({5, 4}), rank);
  const auto w = split(values({3, 4}, 1), rank, Replicate{});
  EXPECT_CLOSE(at::linear(x, w), at::linear(values({5, 4}), values({3, 4}, 1)));
  EXPECT_CLOSE(x.t().matmul(outside).add_(1), values({5, 4}).t().matmul(values({5, 4})).add(1));
  x.view({20}).mul_(2);
  EXPECT_EQUAL(x, values({5, 4}).mul(2));
}

/// Returns views of a 7 x 4 tensor, most of them along dimension 0, which is sharded.
const std::vector<std::function<at::Tensor(const at::Tensor&)>>& views() {
  static const std::vector<std::function<at::Tensor(const at::Tensor&)>> all{
      [](const at::Tensor& x) { return x.slice(0, 2, 6); },
      [](const at::Tensor& x) { return x.slice(1, 1, 3); },
      [](const at::Tensor& x) { return x.select(0, 5); },
      [](const at::Tensor& x) { return x.split(3)[1]; },
      [](const at::Tensor& x) { return x.chunk(3)[2]; },
      [](const at::Tensor& x) { return x.narrow(0, 1, 5); },
      [](const at::Tensor& x) { return x.view({28}); },
      [](const at::Tensor& x) { return x.transpose(0, 1); },
      [](const at::Tensor& x) { return x.narrow(0, 1, 5).select(0, 2); },
      [](const at::Tensor& x) { return x.detach(); },
      [](const at::Tensor& x) { return x.narrow(0, 1, 5).detach(); },
  };
  return all;
}

// In inference mode, a view of a normal tensor is a normal tensor, not an inference tensor.
TEST(InferenceMode, CanViewAndWriteNormalTensors) {
  for (const int ranks : {2, 4}) {
    RunRanks(ranks, [](Rank& rank) {
      for (const auto& view : views()) {
        for (const Placement placement : {Placement(Shard{0}), Placement(Shard{1})}) {
          const auto plain = values({7, 4});
          const auto x = split(values({7, 4}), rank, placement);
          at::Tensor h;
          {
            const c10::InferenceMode inference;
            h = view(x);
            EXPECT_FALSE(h.is_inference());
            EXPECT_EQUAL(h, view(plain));
            EXPECT_TRUE(full_tensor(h.add(1)).is_inference());
            h.mul_(2);
            view(plain).mul_(2);
            EXPECT_EQUAL(x, plain);
            EXPECT_EQUAL(h, view(plain));
          }
          h.add_(1);
          view(plain).add_(1);
          EXPECT_EQUAL(x, plain);
          EXPECT_EQ(x._version(), 2);
        }
      }
    });
  }
}

TEST_ON_RANKS(Autograd, ComputesSecondDerivatives, 2) {
  auto plain = values({5, 4}).requires_grad_();
  const auto once = torch::autograd::grad({plain.pow(3).sum()}, {plain}, {}, {}, true)[0];
  const auto expected = torch::autograd::grad({once.mul(plain).sum()}, {plain})[0];
  const auto x = split(values({5, 4}), rank).requires_grad_();
  const auto y = DistributedTensor(x).redistribute({Shard{1}}).tensor();
  const auto first = torch::autograd::grad({y.pow(3).sum()}, {x}, {}, {}, true)[0];
  const auto second = torch::autograd::grad({first.mul(x).sum()}, {x})[0];
  EXPECT_CLOSE(second, expected);
}

TEST_ON_MESH(Autograd, WorksThroughFromLocalAndToLocal, {2}, {"x"}) {
  auto local = values({3, 4}, rank.rank()).requires_grad_();
  const auto x = DistributedTensor::from_local(local, mesh, {Shard{0}});
  const auto out = DistributedTensor(x.tensor().pow(2)).to_local();
  out.sum().backward();
  EXPECT_TRUE(at::allclose(local.grad(), local.detach() * 2));
}

TEST_ON_RANKS(Autograd, AccumulatesGradientsWithThePlacementsOfTheLeaf, 2) {
  const auto weight = split(values({4, 3}, 1), rank, Replicate{}).requires_grad_();
  for (int i = 0; i < 2; ++i) {
    split(values({6, 4}), rank).matmul(weight).sum().backward();
  }
  auto plain = values({4, 3}, 1).requires_grad_();
  values({6, 4}).matmul(plain).sum().mul(2).backward();
  EXPECT_EQ(DistributedTensor(weight.grad()).placements(), Placements{Replicate{}});
  EXPECT_CLOSE(weight.grad(), plain.grad());
}

TEST(MetaFactory, CreatesMetaTensorsUnlessADeviceIsGiven) {
  const detail::MetaFactoryGuard scope;
  EXPECT_TRUE(at::empty({2, 3}).is_meta());
  EXPECT_TRUE(at::zeros({2}).is_meta());
  EXPECT_TRUE(at::arange(5).is_meta());
  EXPECT_FALSE(at::ones({2}, at::device(at::kCPU)).is_meta());
  EXPECT_TRUE(at::ones({2}, at::device(at::kCPU)).add(1).device().is_cpu());
}

/// A ListingMode that counts random operators and replaces the result of aten::neg by zeros.
struct ReplacingMode final : ListingMode {
  Results call(const Operator& op, const std::function<Results()>& run) override {
    random += op.draws_random ? 1 : 0;
    Results results = ListingMode::call(op, run);
    if (op.name == "aten::neg") {
      results[0] = at::Tensor(results[0].toTensor().mul(0));
    }
    return results;
  }
  int random = 0;
};

TEST(OperatorMode, SeesOperatorsThatComputeTensors) {
  ReplacingMode mode;
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

TEST(OperatorMode, RunsBelowAutogradAndCanReplaceResults) {
  ReplacingMode mode;
  const at::Tensor x = at::ones({3}).requires_grad_();
  const OperatorModeScope scope(mode);
  const at::Tensor y = x.neg();
  y.sum().backward();
  EXPECT_TRUE(at::equal(y, at::zeros({3})));
  EXPECT_TRUE(at::equal(x.grad(), at::zeros({3})));
}

TEST_ON_MESH(OperatorMode, SeesDistributedOperatorsAndRedistributionsOnce, {2}, {"x"}) {
  ListingMode mode;
  const DistributedTensor x = distribute_tensor(at::ones({3, 4}), mesh, {Shard{0}});
  const OperatorModeScope scope(mode);
  const at::Tensor whole = x.tensor().add(x.tensor()).exp();
  DistributedTensor(whole).redistribute({Replicate{}});
  EXPECT_EQ(mode.names,
            (std::vector<std::string>{"aten::add.Tensor", "aten::exp", "tessera::redistribute"}));
}

TEST_ON_MESH(StrictScope, RefusesImplicitCommunicationAndOperatorsWithoutRules, {2}, {"tp"}) {
  const at::Tensor rows = distribute_tensor(values({4, 4}, 0), mesh, {Shard{0}});
  EXPECT_EQUAL(at::nonzero(rows), at::nonzero(values({4, 4}, 0)));
  StrictScope strict;
  EXPECT_ERROR(at::softmax(rows, 0), "aten::_softmax", "Shard(0)", "redistribute");
  EXPECT_EQUAL(rows, values({4, 4}, 0));
  EXPECT_ERROR(at::nonzero(rows), "aten::nonzero has no sharding rule for");
}

TEST_ON_MESH(MixedArguments, ErrorNamesThePlainTensors, {2}, {"tp"}) {
  const at::Tensor rows = distribute_tensor(values({4, 4}), mesh, {Shard{0}});
  EXPECT_ERROR(at::cat({values({4, 4}), rows}), "(argument 0[0], [4, 4], is plain;",
               "argument 0[1], [4, 4] on (tp=2)", "the plain tensors first", "ReplicationScope");
}

using detail::CallKind;

/// Returns the distributed tensor of rank 0 in a fake world of two ranks: rank 1 does not exist.
at::Tensor on_two_ranks(const at::Tensor& tensor, const Placement& placement) {
  static const auto mesh = init_device_mesh(comm::fake_world(0, 2), {2}, {"x"});
  return distribute_tensor(tensor, mesh, {placement}).tensor().detach();
}

struct KindCase {
  const char* what;
  const char* op;
  std::vector<c10::IValue> arguments;
  CallKind kind;
};

std::ostream& operator<<(std::ostream& out, const KindCase& c) {
  return out << c.what;
}

std::vector<KindCase> kind_cases() {
  const auto rows = on_two_ranks(values({4, 4}), Shard{0});
  const auto thin = on_two_ranks(values({3, 4}), Shard{0});
  const auto many_rows = on_two_ranks(values({1024, 4}), Shard{0});
  const auto whole = on_two_ranks(values({4, 4}), Replicate{});
  const auto pending = on_two_ranks(values({4, 4}), Partial{});
  const auto columns = on_two_ranks(values({4, 4}), Shard{1});
  const auto targets = on_two_ranks(at::arange(4), Replicate{});
  const auto expanded = on_two_ranks(values({4, 1}), Shard{0}).expand({4, 3});
  const auto index = on_two_ranks(at::arange(4), Shard{0});
  const auto own_generator = at::detail::createCPUGenerator(1);
  const c10::List<at::Tensor> split({rows, rows}), partial({pending, pending});
  const std::vector<std::int64_t> first{0};
  using enum CallKind;
  return {
      {"NoDistributedTensor", "aten::mm", {values({4, 4}), values({4, 4})}, kPlain},
      {"WrittenInTermsOfOthers", "aten::rand_like", {rows}, kDecomposed},
      {"NothingToMove", "aten::mm", {rows, whole}, kDirect},
      {"APlainTensorThatStays", "aten::mul.Tensor", {whole, values({4, 4})}, kDirect},
      {"AnOperatorOfThisLibrary", "tessera::silu_mul", {rows, rows}, kDirect},
      // `thin` has 2 rows on rank 0 and 1 row on rank 1: libtorch chooses different strides.
      {"AResultOfThinParts", "aten::sum.dim_IntList", {thin, first}, kLocal},
      {"AResultOfThickParts", "aten::sum.dim_IntList", {rows, first}, kDirect},
      {"AnInputToMove", "aten::_softmax", {rows, 0, false}, kLocal},
      {"NoRule", "aten::take", {rows, index}, kLocal},
      {"AWriteToOnePlaceTwice", "aten::add_.Tensor", {expanded, expanded}, kFailTogether},
      {"AFormThatSendsLess", "aten::linalg_vector_norm", {many_rows}, kLowering},
      {"AFormWhoseCollectivesAreItsOwn", "tessera::cross_entropy", {columns, targets}, kLowering},
      {"NumbersByElement", "aten::uniform_", {rows}, kRandomInplace},
      {"NumbersOfTheCallersGenerator", "aten::uniform_", {rows, 0.0, 1.0, own_generator}, kLocal},
      {"NumbersThatAreIntegers", "aten::bernoulli_.float", {index, 0.5}, kRandomInplace},
      {"NumbersOfAnotherOperator", "aten::poisson", {rows}, kLocal},
      {"DropoutByElement", "aten::native_dropout", {rows, 0.5, true}, kNativeDropout},
      {"Lists", "aten::_foreach_add_.List", {split, partial}, kDecomposed},
      {"AWriteThatMovesNothing", "aten::masked_fill_.Scalar", {rows, rows.gt(0), 1.0}, kDirect},
  };
}

detail::CallPlan plan_of(const KindCase& c) {
  const auto op = detail::find_operator(c.op);
  std::vector<c10::IValue> arguments = c.arguments;
  const auto& parameters = op.schema().arguments();
  while (arguments.size() < parameters.size()) {
    arguments.push_back(parameters[arguments.size()].default_value().value_or(c10::IValue()));
  }
  return detail::plan_call(op, detail::operator_info(op), arguments);
}

TEST(CallKind, IsAsListedInTheTable) {
  std::set<CallKind> kinds;
  for (const KindCase& c : kind_cases()) {
    kinds.insert(c.kind);
    const auto plan = plan_of(c);
    EXPECT_EQ(static_cast<int>(plan.kind), static_cast<int>(c.kind)) << c;
  }
  EXPECT_EQ(kinds.size(), static_cast<std::size_t>(CallKind::kNativeDropout) + 1);
}

// A view along a sharded dimension copies data, so operators on it must not run as kDirect.
TEST(CallKind, IsNotDirectForADetachedView) {
  const auto rows = on_two_ranks(values({4, 4}), Shard{0});
  const auto view = rows.slice(0, 1, 3);
  const auto kind_of_neg = [](const at::Tensor& tensor) {
    return plan_of({"neg", "aten::neg", {tensor}, CallKind::kLocal}).kind;
  };
  EXPECT_EQ(static_cast<int>(kind_of_neg(rows)), static_cast<int>(CallKind::kDirect));
  EXPECT_EQ(static_cast<int>(kind_of_neg(view)), static_cast<int>(CallKind::kLocal));
}

}  // namespace
}  // namespace tessera
