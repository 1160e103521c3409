// Each operator of libtorch that makes tensors of tensors, called with arguments that its schema
// allows: of distributed ones no result is plain, and none is wrong. What is refused is refused at
// the call, in one line.

#include <algorithm>
#include <iterator>
#include <set>

#include "operator_sweep_calls.h"
#include "testing/distributed.h"

namespace tessera::sweep {
namespace {

/// Empty, or what is wrong with a result.
std::string fault_of(const c10::IValue& found, const c10::IValue& expected) {
  if (found.isTensorList()) {
    std::string faults;
    const auto ours = found.toTensorVector(), theirs = expected.toTensorVector();
    for (std::size_t i = 0; i < ours.size() && ours.size() == theirs.size(); ++i) {
      faults += fault_of(ours[i], theirs[i]);
    }
    return ours.size() == theirs.size() ? faults : "another number of results; ";
  }
  if (!found.isTensor() || !found.toTensor().defined()) {
    return "";
  }
  if (!tessera::is_distributed(found.toTensor())) {
    return "a plain result; ";
  }
  const at::Tensor ours = testing::full_tensor(found.toTensor()), theirs = expected.toTensor();
  if (ours.sizes() != theirs.sizes() || ours.scalar_type() != theirs.scalar_type()) {
    return "a result of another size or type; ";
  }
  const bool equal = theirs.is_floating_point() || theirs.is_complex()
                         ? at::allclose(ours, theirs, 1e-5, 1e-8, /*equal_nan=*/true)
                         : at::equal(ours, theirs);
  return equal ? "" : "another value; ";
}

at::Tensor split(const at::Tensor& tensor, const DeviceMesh& mesh) {
  const Placement placement = tensor.dim() == 0 ? Placement(Replicate{}) : Placement(Shard{0});
  return distribute_tensor(tensor.clone(), mesh, {placement}).tensor();
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

/// Runs `call` with its tensors replaced by `replace`.
template <class Replace>
std::string outcome(const Call& call, Replace replace) {
  try {
    const Stack results = run(call.op, with_tensors(call.arguments, replace));
    std::string faults;
    for (std::size_t i = 0; i < results.size(); ++i) {
      faults += fault_of(results[i], call.results[i]);
    }
    return faults;
  } catch (const std::exception& error) {
    return "threw " + first_line(error.what());
  }
}

/// A call with arguments that no profile has.
using Function = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

struct Written {
  std::string name;
  std::vector<at::Tensor> inputs;
  Function function;
};

std::vector<Written> written_calls() {
  const auto numbers = [](double a) { return at::scalar_tensor(a, at::kDouble); };
  const auto cell = [](std::int64_t gates) {
    return std::vector<at::Tensor>{positive({5, 3}), positive({5, 4}), positive({gates * 4, 3}),
                                   positive({gates * 4, 4})};
  };
  const at::Tensor bag = at::tensor({0, 2, 1, 3, 3, 1}, at::kLong);
  return {
      {"linspace",
       {numbers(1), numbers(3)},
       [](auto& t) { return std::vector{at::linspace(t[0], t[1], 5)}; }},
      {"gru_cell", cell(3),
       [](auto& t) { return std::vector{at::gru_cell(t[0], t[1], t[2], t[3])}; }},
      {"rnn_cell", cell(1),
       [](auto& t) { return std::vector{at::rnn_tanh_cell(t[0], t[1], t[2], t[3])}; }},
      {"lstm_cell", cell(4),
       [](auto& t) {
         const auto [h, c] = at::lstm_cell(t[0], {t[1], t[1]}, t[2], t[3]);
         return std::vector{h, c};
       }},
      {"lstm",
       {positive({6, 5, 3}), positive({1, 5, 4}), positive({16, 3}), positive({16, 4})},
       [](auto& t) {
         const auto [x, h, c] =
             at::lstm(t[0], {t[1], t[1]}, {t[2], t[3]}, false, 1, 0.0, false, false, false);
         return std::vector{x, h, c};
       }},
      {"gru",
       {positive({6, 5, 3}), positive({1, 5, 4}), positive({12, 3}), positive({12, 4})},
       [](auto& t) {
         const auto [x, h] = at::gru(t[0], t[1], {t[2], t[3]}, false, 1, 0.0, false, false, false);
         return std::vector{x, h};
       }},
      {"embedding_bag",
       {positive({4, 3}), bag, at::tensor({0, 2, 3}, at::kLong)},
       [](auto& t) { return std::vector{std::get<0>(at::embedding_bag(t[0], t[1], t[2]))}; }},
      {"meshgrid",
       {positive({5}), positive({3})},
       [](auto& t) { return at::meshgrid({t[0], t[1]}, "xy"); }},
      {"batch_norm",
       {positive({4, 2, 6})},
       [](auto& t) {
         return std::vector{at::batch_norm(t[0], {}, {}, {}, {}, true, 0.1, 1e-5, false)};
       }},
      {"one_hot",
       {bag},
       [](auto& t) { return std::vector{at::one_hot(t[0]), at::one_hot(t[0], 6)}; }},
      {"unique",
       {bag},
       [](auto& t) {
         const auto [values, inverse, counts] = at::_unique2(t[0], true, true, true);
         return std::vector{values, inverse, counts};
       }},
      {"like",
       {positive({5, 3})},
       [](auto& t) {
         return std::vector{t[0].new_ones({4, 2}), t[0].new_full({3}, 2), t[0].new_zeros({2}),
                            at::full_like(t[0], 3), at::scalar_tensor(1.0, t[0].options()) + t[0]};
       }},
      {"in_place",
       {positive({5, 3})},
       [](auto& t) {
         t[0].fill_diagonal_(2);
         return std::vector{t[0].tril_(), at::eye(5, at::kDouble).mul(2).sum() + t[0],
                            t[0].clone().fill_(3)};
       }},
  };
}

TEST(OperatorSweep, FindsNoFaultInCallsWithSpecialArguments) {
  for (const Written& call : written_calls()) {
    const auto copies = [&](auto replace) {
      std::vector<at::Tensor> inputs;
      std::ranges::transform(call.inputs, std::back_inserter(inputs), replace);
      return inputs;
    };
    const auto expected = call.function(copies([](auto& tensor) { return tensor.clone(); }));
    RunOnMesh({2}, {"x"}, [&](const DeviceMesh& mesh) {
      std::string fault;
      try {
        fault = fault_of(call.function(copies([&](auto& tensor) { return split(tensor, mesh); })),
                         expected);
      } catch (const std::exception& error) {
        fault = "threw " + first_line(error.what());
      }
      EXPECT_EQ(fault, "") << call.name;
    });
  }
}

TEST(OperatorSweep, FindsNoPlainAndNoWrongResult) {
  const std::vector<Call> all = calls();
  std::set<std::string> operators;
  for (const Call& call : all) {
    operators.insert(call.op.schema().name());
  }
  RunOnMesh({2}, {"x"}, [&](Rank& rank, const DeviceMesh& mesh) {
    for (const Call& call : all) {
      const std::string found =
          outcome(call, [&](const at::Tensor& tensor) { return split(tensor, mesh); });
      if (!found.empty() && rank.rank() == 0) {
        ADD_FAILURE() << c10::toString(call.op.operator_name()) << ": " << found;
      }
    }
  });
  EXPECT_GT(operators.size(), 500U);
}

// These read only the sizes or the type of a plain tensor beside a distributed one.
TEST(OperatorSweep, FindsNoPlainTensorThatIsTakenForTheSameOnAllRanks) {
  static const std::set<std::string> kReadsNoValues{
      "aten::type_as",    "aten::view_as",          "aten::expand_as",  "aten::to",
      "aten::reshape_as", "aten::atleast_1d",       "aten::atleast_2d", "aten::atleast_3d",
      "aten::meshgrid",   "aten::broadcast_tensors"};
  const std::vector<Call> all = calls();
  RunOnMesh({2}, {"x"}, [&](Rank& rank, const DeviceMesh& mesh) {
    for (const Call& call : all) {
      int plain = -1;
      const auto first = [&](const at::Tensor& tensor) {
        const bool is_first = plain++ < 0;
        return is_first ? split(tensor, mesh) : tensor.add(rank.rank());
      };
      const std::string found = outcome(call, first);
      if (plain > 0 && !found.starts_with("threw ") &&
          !kReadsNoValues.contains(call.op.schema().name())) {
        ADD_FAILURE() << c10::toString(call.op.operator_name()) << ": " << found;
      }
    }
  });
}

}  // namespace
}  // namespace tessera::sweep
