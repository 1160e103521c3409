// Each kind of plan, and a call that is planned so.

#include "plan/call_plan.h"

#include <ATen/CPUGeneratorImpl.h>

#include <ostream>
#include <set>

#include "testing/distributed.h"

namespace tessera {
namespace {

using detail::CallKind;
using testing::values;

/// A rank of two, which plans and does not communicate.
at::Tensor on_two_ranks(const at::Tensor& tensor, const Placement& placement) {
  static const auto mesh = init_device_mesh(comm::fake_world(0, 2), {2}, {"x"});
  return distribute_tensor(tensor, mesh, {placement}).tensor().detach();
}

struct KindCase {
  const char* what;
  const char* op;
  std::vector<c10::IValue> arguments;  ///< those left out take their defaults
  CallKind kind;
  CallKind otherwise;
};

std::ostream& operator<<(std::ostream& out, const KindCase& c) {
  return out << c.what;
}

KindCase plain(const char* what, const char* op, std::vector<c10::IValue> arguments,
               CallKind kind) {
  return {what, op, std::move(arguments), kind, kind};
}

std::vector<KindCase> kind_cases() {
  const auto rows = on_two_ranks(values({4, 4}), Shard{0});
  const auto thin = on_two_ranks(values({3, 4}), Shard{0});
  const auto many_rows = on_two_ranks(values({1024, 4}), Shard{0});
  const auto whole = on_two_ranks(values({4, 4}), Replicate{});
  const auto pending = on_two_ranks(values({4, 4}), Partial{});
  const auto columns = on_two_ranks(values({4, 4}), Shard{1});
  const auto targets = on_two_ranks(at::arange(4), Replicate{});
  const auto batch = on_two_ranks(at::eye(2, at::kDouble).repeat({4, 1, 1}), Shard{0});
  const auto expanded = on_two_ranks(values({4, 1}), Shard{0}).expand({4, 3});
  const auto index = on_two_ranks(at::arange(4), Shard{0});
  const auto own_generator = at::detail::createCPUGenerator(1);
  const c10::List<at::Tensor> split({rows}), replicated({whole}), partial({pending});
  return {
      plain("NoDistributedTensor", "aten::mm", {values({4, 4}), values({4, 4})}, CallKind::kPlain),
      plain("WrittenInTermsOfOthers", "aten::rand_like", {rows}, CallKind::kDecomposed),
      plain("NothingToMove", "aten::mm", {rows, whole}, CallKind::kDirect),
      plain("APlainTensorThatStays", "aten::mul.Tensor", {whole, values({4, 4})},
            CallKind::kDirect),
      plain("AnOperatorOfThisLibrary", "tessera::silu_mul", {rows, rows}, CallKind::kDirect),
      // Ranks that have one row of three would not agree on the order of columns in memory.
      plain("AResultOfThinParts", "aten::sum.dim_IntList", {thin, std::vector<std::int64_t>{0}},
            CallKind::kLocal),
      plain("AResultOfThickParts", "aten::sum.dim_IntList", {rows, std::vector<std::int64_t>{0}},
            CallKind::kDirect),
      plain("AnInputToMove", "aten::_softmax", {rows, 0, false}, CallKind::kLocal),
      plain("NoRule", "aten::take", {rows, index}, CallKind::kLocal),
      plain("AWriteToOnePlaceTwice", "aten::add_.Tensor", {expanded, expanded},
            CallKind::kFailTogether),
      plain("MatricesOfTheRanks", "aten::_linalg_eigh", {batch}, CallKind::kAgreed),
      plain("MatricesThatAreToBeChecked", "aten::linalg_inv_ex", {batch, true}, CallKind::kAgreed),
      plain("MatricesThatAreNot", "aten::linalg_inv_ex", {batch, false}, CallKind::kDirect),
      plain("AFormThatSendsLess", "aten::argmax", {many_rows, 0}, CallKind::kLowering),
      plain("AFormWhoseCollectivesAreItsOwn", "tessera::cross_entropy", {columns, targets},
            CallKind::kLowering),
      plain("NumbersByElement", "aten::uniform_", {rows}, CallKind::kRandomInplace),
      plain("NumbersOfTheCallersGenerator", "aten::uniform_", {rows, 0.0, 1.0, own_generator},
            CallKind::kLocal),
      plain("NumbersThatAreIntegers", "aten::bernoulli_.float", {index, 0.5},
            CallKind::kRandomInplace),
      plain("NumbersOfAnotherOperator", "aten::poisson", {rows}, CallKind::kLocal),
      plain("DropoutByElement", "aten::native_dropout", {rows, 0.5, true},
            CallKind::kNativeDropout),
      plain("ListsAsTheyAre", "aten::_foreach_add_.List", {split, split}, CallKind::kDirect),
      {"ListsOfCopies",
       "aten::_foreach_add_.List",
       {split, partial},
       CallKind::kForeach,
       CallKind::kLocal},
      {"AWriteOfASplitGradient",
       "aten::index_add_",
       {whole, 0, index, rows},
       CallKind::kBackwardZeros,
       CallKind::kLocal},
      plain("AWriteThatMovesNothing", "aten::masked_fill_.Scalar", {rows, rows.gt(0), 1.0},
            CallKind::kDirect),
      {"Zeros", "aten::zeros_like", {rows}, CallKind::kNewZeros, CallKind::kDirect},
      {"AnOperatorThatAutogradMayNotKnow",
       "tessera_test::halve",
       {rows},
       CallKind::kRecorded,
       CallKind::kDirect},
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

TEST(CallKind, FollowsFromTheCall) {
  for (const KindCase& c : kind_cases()) {
    const auto plan = plan_of(c);
    EXPECT_EQ(static_cast<int>(plan.kind), static_cast<int>(c.kind)) << c;
    if (c.kind != c.otherwise) {
      EXPECT_EQ(static_cast<int>(plan.otherwise), static_cast<int>(c.otherwise)) << c;
    }
  }
}

TEST(CallKind, HasARowForEachKind) {
  std::set<CallKind> kinds;
  for (const KindCase& c : kind_cases()) {
    kinds.insert(c.kind);
  }
  EXPECT_EQ(kinds.size(), static_cast<std::size_t>(CallKind::kRecorded) + 1);
}

// What a view of a gathered tensor holds is a copy: such a call is never run as it is.
TEST(CallKind, IsNotDirectForADetachedView) {
  const auto rows = on_two_ranks(values({4, 4}), Shard{0});
  const auto view = rows.slice(0, 1, 3);
  const auto kind_of_neg = [](const at::Tensor& tensor) {
    return plan_of(plain("neg", "aten::neg", {tensor}, CallKind::kLocal)).kind;
  };
  EXPECT_EQ(static_cast<int>(kind_of_neg(rows)), static_cast<int>(CallKind::kDirect));
  EXPECT_EQ(static_cast<int>(kind_of_neg(view)), static_cast<int>(CallKind::kLocal));
}

}  // namespace
}  // namespace tessera
