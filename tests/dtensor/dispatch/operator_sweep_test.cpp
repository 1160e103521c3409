// Calls each libtorch operator that takes and returns tensors. Distributed arguments must give
// correct distributed results, or an error of one line.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/ivalue.h>

#include <array>
#include <iterator>
#include <optional>
#include <regex>
#include <set>

#include "tessera/kernels/detail/tensors_in_values.h"
#include "testing/distributed.h"

namespace tessera::sweep {
namespace {

using testing::counting_values;
using torch::jit::Stack;

/// An operator call that libtorch accepts for plain tensors, and the results of the call.
struct Call {
  c10::OperatorHandle op;
  Stack arguments;
  Stack results;
};

template <class Replace>
Stack with_tensors(const Stack& stack, const Replace& replace) {
  Stack replaced;
  for (const c10::IValue& value : stack) {
    replaced.push_back(kernels::with_tensors(value, replace));
  }
  return replaced;
}

at::Tensor positive(at::IntArrayRef sizes) {
  return counting_values(sizes).mul(1.7).sin().mul(0.45).add(0.5);
}

Stack run(const c10::OperatorHandle& op, Stack stack) {
  op.callBoxed(stack);
  return stack;
}

/// Argument values for operator calls. tensor(i) returns the i-th tensor argument, counted from 0.
struct Profile {
  at::Tensor (*tensor)(int number);
  std::int64_t integer;
  std::vector<std::int64_t> integers;
};

at::Tensor matrix(at::ScalarType type) {
  return counting_values({4, 4}).mul(7).remainder(5).to(type);
}

/// Returns a symmetric, positive definite matrix, as factorisations need.
at::Tensor definite() {
  const at::Tensor m = counting_values({4, 4}).sin();
  return m.mm(m.t()).add(at::eye(4, at::kDouble)).mul(0.1);
}

const std::vector<Profile>& profiles() {
  static const std::vector<Profile> all = [] {
    const std::array tensors{
        +[](int) { return definite(); },
        +[](int) { return positive({4}); },
        +[](int n) { return n == 0 ? definite() : matrix(at::kLong).remainder(4); },
        +[](int n) { return n == 0 ? definite() : counting_values({4}, at::kLong).flip(0); },
        +[](int) { return matrix(at::kLong); },
        +[](int) { return counting_values({4}, at::kLong).flip(0); },
        +[](int) { return positive({2, 4, 4, 4}); },
        +[](int) { return positive({4, 2, 4}); },
        +[](int) { return matrix(at::kLong).gt(1); },
        +[](int n) { return n == 0 ? definite() : matrix(at::kLong).gt(1); },
        +[](int n) { return n == 0 ? positive({2, 4, 4, 4}) : positive({4, 4, 2, 2}); },
        +[](int) { return at::complex(definite(), definite().t()); },
    };
    std::vector<Profile> made;
    for (const auto tensor : tensors) {
      for (const auto& [integer, integers] :
           std::vector<std::pair<std::int64_t, std::vector<std::int64_t>>>{
               {0, {0}}, {1, {1, 1}}, {2, {2, 2}}, {2, {4, 4}}, {1, {4}}}) {
        made.push_back({tensor, integer, integers});
      }
    }
    return made;
  }();
  return all;
}

/// Returns a value for `argument`; nullopt if the test supports no values of the argument's type.
std::optional<c10::IValue> value_of(const c10::Argument& argument, const Profile& profile,
                                    int& number) {
  using Kind = c10::TypeKind;
  const c10::Type& type = *argument.type();
  if (type.kind() == Kind::TensorType) {
    return profile.tensor(number++);
  }
  if (const auto* list = type.castRaw<c10::ListType>()) {
    const c10::Type& element = *list->getElementType();
    if (element.kind() == Kind::TensorType) {
      return c10::List<at::Tensor>({profile.tensor(number++), profile.tensor(number++)});
    }
    if (element.kind() == Kind::OptionalType) {
      number += 1;
      return c10::List<std::optional<at::Tensor>>({profile.tensor(number++)});
    }
    if (argument.default_value()) {
      return *argument.default_value();
    }
    if (element.kind() == Kind::IntType) {
      return profile.integers;
    }
    return std::nullopt;
  }
  if (argument.default_value()) {
    return *argument.default_value();
  }
  switch (type.kind()) {
    case Kind::OptionalType:
      return c10::IValue();
    case Kind::IntType:
      return profile.integer;
    case Kind::BoolType:
      return false;
    case Kind::FloatType:
      return 0.5;
    case Kind::NumberType:
      return profile.integer == 0 ? c10::IValue(0.5) : c10::IValue(profile.integer);
    default:
      return std::nullopt;
  }
}

std::optional<Stack> arguments_of(const c10::OperatorHandle& op, const Profile& profile) {
  Stack stack;
  int number = 0;
  for (const c10::Argument& argument : op.schema().arguments()) {
    const auto value = value_of(argument, profile, number);
    if (!value) {
      return std::nullopt;
    }
    stack.push_back(*value);
  }
  return stack;
}

/// Whether the test skips `op`: operators of other devices, random operators, and operators on
/// sparse or quantized tensors, for example.
bool is_left_out(const c10::OperatorHandle& op) {
  static const std::regex kLeftOut(
      "(_|mkldnn|cudnn|miopen|mps|fbgemm|quant|fake_|sparse|q_|rename|align|resize|set_|nested|"
      "to_mkl|native_batch_norm|empty_like|new_empty|to_spa|is_|data|record|retain).*");
  std::string_view name = op.schema().name();
  if (!name.starts_with("aten::")) {
    return true;
  }
  name.remove_prefix(6);
  return std::regex_match(name.begin(), name.end(), kLeftOut) || name.ends_with("_backward") ||
         name.find("sparse") != name.npos || op.hasTag(at::Tag::nondeterministic_seeded);
}

bool takes_and_makes_tensors(const c10::FunctionSchema& schema) {
  const auto is_tensor = [](const auto& argument) {
    return argument.type()->isSubtypeOf(*c10::TensorType::get()) ||
           argument.type()->isSubtypeOf(*c10::ListType::ofTensors());
  };
  const auto writes = [](const auto& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  };
  return std::ranges::any_of(schema.arguments(), is_tensor) &&
         std::ranges::any_of(schema.returns(), is_tensor) &&
         std::ranges::none_of(schema.arguments(), writes);
}

/// Returns up to two calls of each operator that the test does not skip.
std::vector<Call> calls() {
  std::vector<Call> found;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || is_left_out(*op) || !takes_and_makes_tensors(op->schema())) {
      continue;
    }
    int taken = 0;
    for (const Profile& profile : profiles()) {
      const auto arguments = arguments_of(*op, profile);
      if (!arguments || taken == 2) {
        break;
      }
      try {
        const auto copy = [](const at::Tensor& tensor) { return tensor.clone(); };
        found.push_back({*op, *arguments, run(*op, with_tensors(*arguments, copy))});
        ++taken;
      } catch (const std::exception&) {
      }
    }
  }
  return found;
}

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

/// Runs `call` with replace(t) for each tensor t. Returns a description of the failure, or "".
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

TEST(OperatorSweep, FindsNoWrongOrPlainResults) {
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

// These operators take a distributed and a plain tensor, but read no values of the plain tensor.
TEST(OperatorSweep, FindsNoUncheckedPlainArguments) {
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
