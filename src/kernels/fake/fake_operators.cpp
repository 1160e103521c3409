// Operators by what they do, as their schemas tell it, and rules for the few that have no meta
// kernel in libtorch's C++ (it has them in Python).

#include "fake/fake_operators.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/core/error.h"

namespace tessera::kernels {
namespace {

using torch::jit::Stack;
using Sizes = std::vector<std::int64_t>;

/// In front of the results: the arguments.
using Arguments = c10::ArrayRef<c10::IValue>;
using Rule = std::vector<at::Tensor> (*)(Arguments);

std::vector<at::Tensor> index_select(Arguments arguments) {
  const at::Tensor& self = arguments[0].toTensor();
  Sizes sizes = self.sizes().vec();
  if (!sizes.empty()) {
    sizes[static_cast<std::size_t>(c10::maybe_wrap_dim(arguments[1].toInt(), self.dim()))] =
        arguments[2].toTensor().numel();
  }
  return {at::empty(sizes, self.options())};
}

std::vector<at::Tensor> embedding_dense_backward(Arguments arguments) {
  const at::Tensor& grad = arguments[0].toTensor();
  return {at::empty({arguments[2].toInt(), grad.size(-1)}, grad.options())};
}

std::vector<at::Tensor> where(Arguments arguments) {
  const at::Tensor& condition = arguments[0].toTensor();
  const at::Tensor& self = arguments[1].toTensor();
  const at::Tensor& other = arguments[2].toTensor();
  const auto sizes = at::infer_size(condition.sizes(), at::infer_size(self.sizes(), other.sizes()));
  return {at::empty(
      sizes, self.options().dtype(at::promote_types(self.scalar_type(), other.scalar_type())))};
}

/// Memory as (batch, tokens, heads, width), as the kernel makes it.
at::Tensor by_tokens(const at::Tensor& like) {
  return at::empty({like.size(0), like.size(2), like.size(1), like.size(3)}, like.options())
      .transpose(1, 2);
}

/// (batch, heads, tokens, width) and the logarithms of the sums, one for each row of scores.
std::vector<at::Tensor> flash_attention(Arguments arguments) {
  const at::Tensor& query = arguments[0].toTensor();
  const auto type = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {by_tokens(query),
          at::empty({query.size(0), query.size(2), query.size(1)}, query.options().dtype(type))
              .transpose(1, 2)};
}

std::vector<at::Tensor> flash_attention_backward(Arguments arguments) {
  return {by_tokens(arguments[1].toTensor()), by_tokens(arguments[2].toTensor()),
          by_tokens(arguments[3].toTensor())};
}

struct Named {
  std::string_view name;  ///< with the overload
  Rule rule;
};
constexpr std::array kRules{
    Named{"aten::index_select", &index_select},
    Named{"aten::embedding_dense_backward", &embedding_dense_backward},
    Named{"aten::where.self", &where},
    Named{"aten::_scaled_dot_product_flash_attention_for_cpu", &flash_attention},
    Named{"aten::_scaled_dot_product_flash_attention_for_cpu_backward", &flash_attention_backward}};

std::string full_name(const c10::OperatorHandle& op) {
  const c10::OperatorName& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

const Named* rule_of(const c10::OperatorHandle& op) {
  const auto found = std::ranges::find(kRules, full_name(op), &Named::name);
  return found == kRules.end() ? nullptr : &*found;
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// Changes what a tensor is, or looks at it, without its values.
bool is_about_sizes(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string_view name = schema.name();
  const auto returns_view = [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !writes(result);
  };
  const auto is_tensor = [](const c10::Argument& result) {
    return result.type()->isSubtypeOf(*c10::TensorType::get()) ||
           result.type()->isSubtypeOf(*c10::ListType::ofTensors());
  };
  return op.hasTag(at::Tag::inplace_view) || name.starts_with("aten::resize") ||
         name.starts_with("aten::set_") || std::ranges::any_of(schema.returns(), returns_view) ||
         (!schema.returns().empty() && std::ranges::none_of(schema.returns(), is_tensor));
}

bool has(const c10::OperatorHandle& op, c10::DispatchKey key) {
  return op.hasKernelForDispatchKey(key);
}

FakeKind classify(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  if (schema.name() == "aten::_local_scalar_dense") {
    return FakeKind::kItem;
  }
  // The one operator made of others that writes memory itself.
  if (schema.name() == "aten::copy_") {
    return FakeKind::kInPlace;
  }
  if (rule_of(op) != nullptr) {
    return FakeKind::kOwnRule;
  }
  if (is_about_sizes(op) || has(op, c10::DispatchKey::CompositeImplicitAutograd) ||
      has(op, c10::DispatchKey::CompositeExplicitAutograd)) {
    return FakeKind::kThrough;
  }
  if (std::ranges::any_of(schema.arguments(), &c10::Argument::is_out)) {
    return FakeKind::kOut;
  }
  if (std::ranges::all_of(schema.returns(), writes)) {
    return FakeKind::kInPlace;
  }
  return has(op, c10::DispatchKey::Meta) ? FakeKind::kMeta : FakeKind::kUnknown;
}

}  // namespace

FakeKind fake_kind(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, FakeKind> known;
  const auto [entry, is_new] = known.try_emplace(&op.schema());
  if (is_new) {
    entry->second = classify(op);
  }
  return entry->second;
}

void make_fake_results(const c10::OperatorHandle& op, Stack& stack) {
  const std::size_t count = op.schema().arguments().size();
  std::vector<at::Tensor> results = rule_of(op)->rule(torch::jit::last(stack, count));
  torch::jit::drop(stack, count);
  for (at::Tensor& result : results) {
    stack.emplace_back(std::move(result));
  }
}

}  // namespace tessera::kernels
