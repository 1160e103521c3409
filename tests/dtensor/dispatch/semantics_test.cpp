#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <ostream>
#include <set>

#include "dtensor/listing_mode.h"
#include "plan/call_plan.h"
#include "tessera/comm/trace.h"
#include "tessera/dtensor/communication_scope.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "tessera/dtensor/local_map.h"
#include "testing/distributed.h"

namespace tessera {

// Distributed tensors where libtorch looks twice: inference mode, second derivatives, lazy bits,
// autograd across the border to plain tensors.

namespace {

using testing::full_tensor;
using testing::values;

at::Tensor split(const at::Tensor& value, Rank& rank, const Placement& placement = Shard{0}) {
  const auto mesh = rank.mesh({rank.size()}, {"x"});
  return distribute_tensor(value, mesh, {placement}).tensor().detach();
}

TEST_ON_RANKS(InferenceMode, RunsCompositeAndViewAndInPlaceOperators, 2) {
  const auto outside = split(values({5, 4}), rank);
  const c10::InferenceMode inference;
  const auto x = split(values({5, 4}), rank);
  const auto w = split(values({3, 4}, 1), rank, Replicate{});
  EXPECT_CLOSE(at::linear(x, w), at::linear(values({5, 4}), values({3, 4}, 1)));
  EXPECT_CLOSE(x.t().matmul(outside).add_(1), values({5, 4}).t().matmul(values({5, 4})).add(1));
  x.view({20}).mul_(2);
  EXPECT_EQUAL(x, values({5, 4}).mul(2));
}

/// Views of a tensor of 7 by 4, of its split dimension 0 for the most part.
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

// libtorch makes views of them ordinary tensors, too.
TEST(InferenceMode, ViewsAndWritesOrdinaryTensors) {
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

TEST_ON_RANKS(InferenceMode, DoesNotReadAGatheredViewOnceTheViewedTensorWasWritten, 2) {
  const auto x = split(values({7, 4}), rank);
  const c10::InferenceMode inference;
  const auto h = x.slice(0, 2, 6);
  x.add_(1);
  EXPECT_ERROR(full_tensor(h), "after the viewed tensor was written");
  EXPECT_ERROR(h.add(1), "after the viewed tensor was written");
  EXPECT_ERROR(h.zero_(), "after the viewed tensor was written");
  EXPECT_EQUAL(x, values({7, 4}).add(1));
}

TEST_ON_RANKS(Autograd, DifferentiatesTwice, 2) {
  auto plain = values({5, 4}).requires_grad_();
  const auto once = torch::autograd::grad({plain.pow(3).sum()}, {plain}, {}, {}, true)[0];
  const auto expected = torch::autograd::grad({once.mul(plain).sum()}, {plain})[0];
  const auto x = split(values({5, 4}), rank).requires_grad_();
  const auto y = DistributedTensor(x).redistribute({Shard{1}}).tensor();
  const auto first = torch::autograd::grad({y.pow(3).sum()}, {x}, {}, {}, true)[0];
  const auto second = torch::autograd::grad({first.mul(x).sum()}, {x})[0];
  EXPECT_CLOSE(second, expected);
}

TEST_ON_MESH(Autograd, CrossesFromLocalAndToLocal, {2}, {"x"}) {
  auto local = values({3, 4}, rank.rank()).requires_grad_();
  const auto x = DistributedTensor::from_local(local, mesh, {Shard{0}});
  const auto out = DistributedTensor(x.tensor().pow(2)).to_local();
  out.sum().backward();
  EXPECT_TRUE(at::allclose(local.grad(), local.detach() * 2));
}

TEST_ON_RANKS(Autograd, TakesLocalGradientsForWhatTheyAreSaidToBe, 2) {
  const auto x = split(values({4}), rank, Replicate{}).requires_grad_();
  // Every rank adds its own part of the gradient.
  DistributedTensor(x).to_local(Placements{Partial{}}).mul(rank.rank() + 1).sum().backward();
  EXPECT_EQUAL(x.grad(), at::full({4}, 3, at::kDouble));
}

TEST_ON_RANKS(Autograd, AccumulatesIntoAGradientWithTheLeafsPlacements, 2) {
  const auto weight = split(values({4, 3}, 1), rank, Replicate{}).requires_grad_();
  for (int i = 0; i < 2; ++i) {
    split(values({6, 4}), rank).matmul(weight).sum().backward();
  }
  auto plain = values({4, 3}, 1).requires_grad_();
  values({6, 4}).matmul(plain).sum().mul(2).backward();
  EXPECT_EQ(DistributedTensor(weight.grad()).placements(), Placements{Replicate{}});
  EXPECT_CLOSE(weight.grad(), plain.grad());
}

TEST_ON_RANKS(LazyBits, AreVisibleOnTheDistributedTensor, 2) {
  const auto z = at::complex(values({5, 2}), values({5, 2}, 3));
  const auto conjugate = split(z, rank).conj();
  EXPECT_TRUE(conjugate.is_conj());
  EXPECT_EQUAL(conjugate, z.conj().resolve_conj());
  EXPECT_EQUAL(conjugate.mul(2), z.conj().mul(2));
  EXPECT_EQUAL(at::imag(conjugate), at::imag(z.conj()).resolve_neg());
}

TEST(MetaFactory, SendsFactoriesToTheMetaDeviceUnlessTheyNameOne) {
  const detail::MetaFactoryGuard scope;
  EXPECT_TRUE(at::empty({2, 3}).is_meta());
  EXPECT_TRUE(at::zeros({2}).is_meta());
  EXPECT_TRUE(at::arange(5).is_meta());
  EXPECT_FALSE(at::ones({2}, at::device(at::kCPU)).is_meta());
  EXPECT_TRUE(at::ones({2}, at::device(at::kCPU)).add(1).device().is_cpu());
}

/// Also counts random operators, and answers negatives with zeros.
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

TEST(OperatorMode, SeesOperatorsThatMakeTensorsOfTensors) {
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

TEST(OperatorMode, IsBelowAutogradAndMayReplaceResults) {
  ReplacingMode mode;
  const at::Tensor x = at::ones({3}).requires_grad_();
  const OperatorModeScope scope(mode);
  const at::Tensor y = x.neg();
  y.sum().backward();
  EXPECT_TRUE(at::equal(y, at::zeros({3})));
  EXPECT_TRUE(at::equal(x.grad(), at::zeros({3})));  // backward's neg, too
}

TEST(OperatorMode, PausesAndGivesWayToAnother) {
  ListingMode outer, inner;
  const at::Tensor x = at::ones({3});
  const OperatorModeScope scope(outer);
  {
    const OperatorModeScope other(inner);
    x.exp();
    const OperatorModePause pause;
    x.sin();
  }
  x.cos();
  EXPECT_EQ(inner.names, (std::vector<std::string>{"aten::exp"}));
  EXPECT_EQ(outer.names, (std::vector<std::string>{"aten::cos"}));
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

at::Tensor leaf(const at::Tensor& value, const DeviceMesh& mesh, const Placements& placements) {
  return distribute_tensor(value, mesh, placements).tensor().detach().requires_grad_();
}

struct Mlp {
  at::Tensor up, down, norm;
  at::Tensor x;
};

Mlp plain_mlp(std::int64_t hidden) {
  return {values({hidden, 6}, 1).requires_grad_(), values({6, hidden}, 2).requires_grad_(),
          values({6}, 3).requires_grad_(), values({8, 6}, 4).requires_grad_()};
}

at::Tensor forward(const Mlp& m) {
  return at::silu(m.x.matmul(m.up.t())).matmul(m.down.t());
}

/// Column- then row-parallel: one reduction forward, one backward, hidden sizes that don't divide.
TEST_ON_MESH(Strict, ColumnThenRowParallelReducesOnce, {4}, {"tp"}) {
  const auto plain = plain_mlp(7);
  forward(plain).pow(2).sum().backward();
  StrictScope strict;
  const Mlp m{leaf(plain.up.detach(), mesh, {Shard{0}}),
              leaf(plain.down.detach(), mesh, {Shard{1}}),
              {},
              leaf(plain.x.detach(), mesh, {Replicate{}})};
  const auto before = rank.world()->traffic().table();
  const DistributedTensor out(forward(m));
  EXPECT_EQ(out.placements(), Placements{Partial{}});
  const auto reduced = out.redistribute({Replicate{}});
  EXPECT_EQ(comm::total(rank.world()->traffic().since(before)).calls, 1);
  reduced.tensor().pow(2).sum().backward();
  // The other one: the gradient of x, partial until its leaf has it.
  EXPECT_EQ(comm::total(rank.world()->traffic().since(before)).calls, 2);
  EXPECT_CLOSE(m.up.grad(), plain.up.grad(), 1e-9, 1e-12);
  EXPECT_CLOSE(m.down.grad(), plain.down.grad(), 1e-9, 1e-12);
  EXPECT_CLOSE(m.x.grad(), plain.x.grad(), 1e-9, 1e-12);
}

TEST_ON_MESH(Strict, RmsNormOnASplitSequenceCommunicatesForItsWeightAlone, {4}, {"tp"}) {
  const auto plain = plain_mlp(4);
  at::rms_norm(plain.x, {6}, plain.norm, 1e-5).pow(2).sum().backward();
  StrictScope strict;
  const auto x = leaf(plain.x.detach(), mesh, {Shard{0}});
  const auto weight = leaf(plain.norm.detach(), mesh, {Replicate{}});
  const auto before = rank.world()->traffic().table();
  const auto y = at::rms_norm(x, {6}, weight, 1e-5).pow(2);
  EXPECT_EQ(comm::total(rank.world()->traffic().since(before)).calls, 0);
  y.sum().backward();
  const auto table = rank.world()->traffic().since(before);
  EXPECT_EQ(comm::total(table).calls, 1);
  EXPECT_EQ(table.begin()->first.second, "all_reduce");
  EXPECT_CLOSE(x.grad(), plain.x.grad(), 1e-9, 1e-12);
  EXPECT_CLOSE(weight.grad(), plain.norm.grad(), 1e-9, 1e-12);
}

TEST_ON_MESH(Strict, RefusesHiddenCommunicationAndOperatorsWithoutARule, {2}, {"tp"}) {
  const at::Tensor rows = distribute_tensor(values({4, 4}, 0), mesh, {Shard{0}});
  EXPECT_EQUAL(at::nonzero(rows), at::nonzero(values({4, 4}, 0)));
  StrictScope strict;
  EXPECT_ERROR(at::softmax(rows, 0), "aten::_softmax", "Shard(0)", "redistribute");
  EXPECT_EQUAL(rows, values({4, 4}, 0));  // the next collective still works
  EXPECT_ERROR(at::nonzero(rows), "aten::nonzero has no sharding rule for");
}

TEST_ON_MESH(Policy, CountsImplicitRedistributions, {2}, {"tp"}) {
  const auto rows = distribute_tensor(values({4, 4}, 0), mesh, {Shard{0}});
  const auto before = implicit_redistributions();
  at::exp(rows.tensor());
  EXPECT_EQ(implicit_redistributions(), before);
  at::softmax(rows.tensor(), 0);
  EXPECT_EQ(implicit_redistributions(), before + 1);
}

TEST_ON_MESH(Policy, RefusesPlainTensorsUnlessVouchedFor, {2}, {"tp"}) {
  const at::Tensor rows = distribute_tensor(values({4, 4}, 0), mesh, {Shard{0}});
  EXPECT_ERROR(rows + values({4, 4}, 1), "mixes distributed tensors with plain ones",
               "argument 0, [4, 4] on (tp=2) as [Shard(0)]; argument 1, [4, 4], is plain):",
               "distribute those first", "ReplicationScope");
  EXPECT_ERROR(at::cat({values({4, 4}, 1), rows}), "(argument 0[0], [4, 4], is plain;",
               "argument 0[1], [4, 4] on (tp=2)");
  EXPECT_NO_THROW(rows + 1);
  ReplicationScope replicated;
  EXPECT_CLOSE(rows + values({4, 4}, 1), values({4, 4}, 0) + values({4, 4}, 1), 1e-9, 1e-12);
}

TEST(Failure, OnOneRankEndsTheOthers) {
  const auto errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    const auto mesh = rank.mesh({2}, {"a"});
    const auto t = distribute_tensor(at::ones({4}), mesh, {Shard{0}});
    t.full_tensor();
    if (rank.rank() == 1) {
      fail("lost");
    }
    t.full_tensor();
  });
  EXPECT_EQ(errors[1], "lost");
  EXPECT_CONTAINS(errors[0], "all_gather in group", "look for");
}

// The example in the comment of local_map.h, as it stands there.

TEST_ON_MESH(ExtensionExamples, LocalMapRunsOnShardsForwardAndBackward, {4}, {"x"}) {
  const auto values = at::arange(24, at::kDouble).view({8, 3});
  const at::Tensor x = distribute_tensor(values, mesh, {Shard{0}}).tensor().detach();
  x.requires_grad_();
  const auto sum_of_squares = [](const std::vector<at::Tensor>& locals) {
    return std::vector{locals[0].square().sum()};
  };
  at::Tensor loss = local_map(sum_of_squares, {x}, mesh, {{Partial{}}}).front();
  loss.backward();
  EXPECT_CLOSE(loss, values.square().sum());
  EXPECT_CLOSE(x.grad(), 2 * values);
}

// Each kind of plan, and a call that is planned so.

using detail::CallKind;

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

TEST(CallKind, FollowsFromTheCallAndHasARowEach) {
  std::set<CallKind> kinds;
  for (const KindCase& c : kind_cases()) {
    kinds.insert(c.kind);
    const auto plan = plan_of(c);
    EXPECT_EQ(static_cast<int>(plan.kind), static_cast<int>(c.kind)) << c;
    if (c.kind != c.otherwise) {
      EXPECT_EQ(static_cast<int>(plan.otherwise), static_cast<int>(c.otherwise)) << c;
    }
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
