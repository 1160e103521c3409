#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/libtorch_kernels.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/kernels/detail/fake_state.h"
#include "tessera/kernels/detail/tensors_in_values.h"
#include "tessera/kernels/fake_mode.h"

namespace tessera::kernels {

// How a FakeMode runs operators without computing values: the operator's schema determines the
// FakeKind. This file has rules for operators without a C++ meta kernel. Memory plans use the same
// rules.

namespace {

using torch::jit::Stack;
using Sizes = std::vector<std::int64_t>;

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

/// Makes an empty tensor like `like`, stored as (batch, tokens, heads, width), the order in which
/// libtorch's attention kernel writes.
at::Tensor by_tokens(const at::Tensor& like) {
  return at::empty({like.size(0), like.size(2), like.size(1), like.size(3)}, like.options())
      .transpose(1, 2);
}

/// Makes the results of flash attention: the output (batch, heads, tokens, width) and the
/// log-sum-exp, one number for each row of scores.
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

/// Makes the result of convolution. Arguments: input, weight, bias, stride, padding, dilation,
/// transposed, output padding, groups.
std::vector<at::Tensor> convolution(Arguments arguments) {
  const at::Tensor& input = arguments[0].toTensor();
  const at::Tensor& weight = arguments[1].toTensor();
  // Returns argument `i` of convolution as a list of one number per spatial dimension. If the
  // argument has a single number, the number is repeated.
  const auto each = [&](std::size_t i) {
    Sizes numbers = arguments[i].toIntVector();
    numbers.resize(static_cast<std::size_t>(input.dim() - 2), numbers.front());
    return numbers;
  };
  const tessera::detail::Convolution of{.stride = each(3),
                                        .padding = each(4),
                                        .dilation = each(5),
                                        .transposed = arguments[6].toBool(),
                                        .output_padding = each(7),
                                        .groups = arguments[8].toInt()};
  return {at::empty(tessera::detail::convolution_sizes(input.sizes(), weight.sizes(), of),
                    input.options())};
}

/// Makes the result with index `number` of a backward operator, or an undefined tensor if
/// mask[number] is false.
at::Tensor if_wanted(const c10::IValue& mask, std::size_t number, const at::Tensor& like,
                     at::IntArrayRef sizes) {
  return mask.toBoolList()[number] ? at::empty(sizes, like.options()) : at::Tensor();
}

/// Makes the results of convolution_backward. Arguments: gradient, input, weight, sizes of the
/// bias, ..., flags of the needed results.
std::vector<at::Tensor> convolution_backward(Arguments arguments) {
  const at::Tensor& gradient = arguments[0].toTensor();
  const at::Tensor& input = arguments[1].toTensor();
  const at::Tensor& weight = arguments[2].toTensor();
  return {if_wanted(arguments[10], 0, input, input.sizes()),
          if_wanted(arguments[10], 1, weight, weight.sizes()),
          if_wanted(arguments[10], 2, gradient, {gradient.size(1)})};
}

/// Makes the results of native_batch_norm. Arguments: input, weight, bias, running mean and
/// variance, training flag, ...
std::vector<at::Tensor> batch_norm(Arguments arguments) {
  const at::Tensor& input = arguments[0].toTensor();
  const std::int64_t kept = arguments[5].toBool() ? input.size(1) : 0;
  return {at::empty(input.sizes(), input.options()), at::empty({kept}, input.options()),
          at::empty({kept}, input.options())};
}

std::vector<at::Tensor> batch_norm_backward(Arguments arguments) {
  const at::Tensor& input = arguments[1].toTensor();
  return {if_wanted(arguments[9], 0, input, input.sizes()),
          if_wanted(arguments[9], 1, input, {input.size(1)}),
          if_wanted(arguments[9], 2, input, {input.size(1)})};
}

/// Makes the results of native_group_norm (input, weight, bias, batch, channels, elements, groups,
/// ...). Newer libtorch versions compute the operator by operators without a meta kernel.
std::vector<at::Tensor> group_norm(Arguments arguments) {
  const at::Tensor& input = arguments[0].toTensor();
  const Sizes groups{arguments[3].toInt(), arguments[6].toInt()};
  return {at::empty(input.sizes(), input.options()), at::empty(groups, input.options()),
          at::empty(groups, input.options())};
}

/// Makes the results of native_group_norm_backward. Arguments: gradient, input, mean, rstd, weight,
/// batch, channels, ..., flags of the needed results.
std::vector<at::Tensor> group_norm_backward(Arguments arguments) {
  const at::Tensor& input = arguments[1].toTensor();
  const Sizes channels{arguments[6].toInt()};
  return {if_wanted(arguments[9], 0, input, input.sizes()),
          if_wanted(arguments[9], 1, input, channels), if_wanted(arguments[9], 2, input, channels)};
}

/// Makes the results of native_layer_norm; the statistics have the weight's type. Arguments: input,
/// normalised sizes, weight, bias, eps.
std::vector<at::Tensor> layer_norm(Arguments arguments) {
  const at::Tensor& input = arguments[0].toTensor();
  Sizes kept = input.sizes().vec();
  std::fill(kept.end() - std::ssize(arguments[1].toIntVector()), kept.end(), 1);
  const at::TensorOptions statistics =
      arguments[2].isNone() ? input.options() : arguments[2].toTensor().options();
  return {at::empty(input.sizes(), input.options()), at::empty(kept, statistics),
          at::empty(kept, statistics)};
}

/// Makes the results of native_layer_norm_backward. Arguments: gradient, input, normalised sizes,
/// mean, rstd, weight, bias, flags of the needed results.
std::vector<at::Tensor> layer_norm_backward(Arguments arguments) {
  const at::Tensor& input = arguments[1].toTensor();
  const Sizes sizes = arguments[2].toIntVector();
  return {if_wanted(arguments[7], 0, input, input.sizes()),
          if_wanted(arguments[7], 1, input, sizes), if_wanted(arguments[7], 2, input, sizes)};
}

std::vector<at::Tensor> mse_loss_backward(Arguments arguments) {
  const at::Tensor& self = arguments[1].toTensor();
  return {at::empty(at::infer_size(self.sizes(), arguments[2].toTensor().sizes()), self.options())};
}

/// Makes the result of _scaled_mm. Arguments: two matrices, their scales, bias, scale of the
/// result, type of the result, ...
std::vector<at::Tensor> scaled_product(Arguments arguments) {
  const at::Tensor& self = arguments[0].toTensor();
  const at::ScalarType type =
      arguments[6].isNone() ? self.scalar_type() : arguments[6].toScalarType();
  return {at::empty({self.size(0), arguments[1].toTensor().size(1)}, self.options().dtype(type))};
}

/// Makes the result of _grouped_mm. Arguments: rows, matrices (groups, in, out), and the end of
/// each group. With a 2-D second matrix, the groups divide the summed dimension instead.
std::vector<at::Tensor> grouped_product(Arguments arguments) {
  const at::Tensor& first = arguments[0].toTensor();
  const at::Tensor& second = arguments[1].toTensor();
  Sizes sizes{first.size(0), second.size(-1)};
  if (second.dim() == 2) {
    sizes.insert(sizes.begin(), arguments[2].toTensor().size(0));
  }
  return {at::empty(sizes, first.options())};
}

std::vector<at::Tensor> adaptive_pool(Arguments arguments) {
  const at::Tensor& self = arguments[0].toTensor();
  Sizes sizes = self.sizes().vec();
  std::ranges::copy(arguments[1].toIntVector(), sizes.end() - 2);
  return {at::empty(sizes, self.options())};
}

std::vector<at::Tensor> product_into(Arguments arguments) {
  return {arguments.back().toTensor()};
}

std::vector<at::Tensor> as_first(Arguments arguments) {
  const at::Tensor& first = arguments[0].toTensor();
  return {at::empty(first.sizes(), first.options())};
}

std::vector<at::Tensor> as_second(Arguments arguments) {
  const at::Tensor& second = arguments[1].toTensor();
  return {at::empty(second.sizes(), second.options())};
}

struct Named {
  std::string_view name;  ///< full name of the operator, including the overload
  Rule rule;
};
constexpr std::array kRules{
    Named{"aten::index_select", &index_select},
    Named{"aten::embedding_dense_backward", &embedding_dense_backward},
    Named{"aten::where.self", &where},
    Named{"aten::_scaled_mm", &scaled_product},
    Named{"aten::_grouped_mm", &grouped_product},
    Named{"aten::addmm.dtype_out", &product_into},
    Named{"aten::mm.dtype_out", &product_into},
    Named{"aten::_scaled_dot_product_flash_attention_for_cpu", &flash_attention},
    Named{"aten::_scaled_dot_product_flash_attention_for_cpu_backward", &flash_attention_backward},
    Named{"aten::convolution", &convolution},
    Named{"aten::convolution_backward", &convolution_backward},
    Named{"aten::native_batch_norm", &batch_norm},
    Named{"aten::native_batch_norm_backward", &batch_norm_backward},
    Named{"aten::native_group_norm", &group_norm},
    Named{"aten::native_group_norm_backward", &group_norm_backward},
    Named{"aten::native_layer_norm", &layer_norm},
    Named{"aten::native_layer_norm_backward", &layer_norm_backward},
    Named{"aten::mse_loss_backward", &mse_loss_backward},
    Named{"aten::_adaptive_avg_pool2d", &adaptive_pool},
    Named{"aten::_adaptive_avg_pool2d_backward", &as_second},
    Named{"aten::flip", &as_first},
    Named{"aten::hardswish", &as_first},
    Named{"aten::hardswish_backward", &as_first},
    Named{"aten::hardtanh", &as_first},
    Named{"aten::hardtanh_backward", &as_first},
    Named{"aten::native_dropout_backward", &as_first},
    Named{"aten::relu", &as_first},
    Named{"aten::roll", &as_first}};

std::string full_name(const c10::OperatorHandle& op) {
  const c10::OperatorName& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

c10::OperatorName parse_name(std::string_view full) {
  const std::size_t dot = std::min(full.find('.'), full.size());
  return {std::string(full.substr(0, dot)),
          std::string(dot < full.size() ? full.substr(dot + 1) : "")};
}

const Named* rule_of(const c10::OperatorHandle& op) {
  const auto* const found = std::ranges::find(kRules, full_name(op), &Named::name);
  return found == kRules.end() ? nullptr : found;
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// Whether the operator reads or changes a tensor's metadata, such as sizes, but not its values.
bool is_about_sizes(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  const auto returns_view = [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !writes(result);
  };
  const auto is_tensor = [](const c10::Argument& result) {
    return result.type()->isSubtypeOf(*c10::TensorType::get()) ||
           result.type()->isSubtypeOf(*c10::ListType::ofTensors());
  };
  return op.hasTag(at::Tag::inplace_view) || std::ranges::any_of(schema.returns(), returns_view) ||
         (!schema.returns().empty() && std::ranges::none_of(schema.returns(), is_tensor));
}

bool has(const c10::OperatorHandle& op, c10::DispatchKey key) {
  return op.hasKernelForDispatchKey(key);
}

/// What a FakeMode does with an operator on floating-point tensors.
enum class FakeKind : std::uint8_t {
  kThrough,  ///< the operator runs as usual, because it is composite or reads only sizes
  kInPlace,  ///< the operator does not run; its results are the arguments that it writes in place
  kOut,      ///< the operator does not run; its out= arguments are resized
  kMeta,     ///< the operator runs on the meta device, which gives the results' sizes
  kOwnRule,  ///< the operator does not run; a rule of make_fake_results() makes its results
  kItem,     ///< the operator returns the value of a one-element tensor; the result is 1
  kUnknown,
};
FakeKind classify(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  if (schema.name() == "aten::_local_scalar_dense") {
    return FakeKind::kItem;
  }
  // copy_ is the only composite operator whose implementation writes to memory directly.
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

void run_rule(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  make_fake_results(op, *stack);
}

/// The out= variants of elementwise operators that libtorch calls inside other operators.
constexpr std::array<std::string_view, 6> kOutOfElements{
    "aten::abs.out",        "aten::logical_and.out", "aten::logical_not.out",
    "aten::logical_or.out", "aten::logical_xor.out", "aten::where.self_out"};

void run_out_of_elements(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const std::vector<c10::IValue> arguments =
      torch::jit::last(*stack, op.schema().arguments().size()).vec();
  Sizes sizes;
  for (std::size_t i = 0; i + 1 < arguments.size(); ++i) {
    sizes = at::infer_size(sizes, arguments[i].toTensor().sizes());
  }
  const at::Tensor& out = arguments.back().toTensor();
  if (out.sizes() != sizes) {
    out.resize_(sizes);
  }
  torch::jit::drop(*stack, arguments.size());
  stack->emplace_back(out);
}

void implement_if_missing(torch::Library& library, std::string_view name,
                          torch::CppFunction kernel) {
  const auto op = c10::Dispatcher::singleton().findOp(parse_name(name));
  if (op && !has(*op, c10::DispatchKey::Meta)) {
    library.impl(std::string(name).c_str(), std::move(kernel));
  }
}

/// Registers the rules of this file as meta kernels, for operators that have no other meta kernel.
TORCH_LIBRARY_IMPL(aten, Meta, library) {
  for (const Named& each : kRules) {
    implement_if_missing(library, each.name,
                         torch::CppFunction::makeFromBoxedFunction<&run_rule>());
  }
  for (const std::string_view name : kOutOfElements) {
    implement_if_missing(library, name,
                         torch::CppFunction::makeFromBoxedFunction<&run_out_of_elements>());
  }
}

// A FakeMode uses a dispatch key that libtorch reserves for other libraries, between autograd and
// the CPU's kernels. In a FakeMode, every operator call on local tensors arrives at run().

using tessera::detail::kFakeModeKey;

struct Mode {
  c10::DeviceType device;
  FakeMode::Observer observer;
  std::map<std::string, FakeRule> rules;
};

std::atomic<const Mode*> mode = nullptr;

std::vector<at::Tensor> tensors_of(std::span<const c10::IValue> values) {
  std::vector<at::Tensor> tensors;
  visit_tensors(values, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

/// Whether a FakeMode computes no values for a call with these arguments: at least one tensor is
/// floating-point, and all tensors are on the CPU.
bool is_fake(std::span<const c10::IValue> arguments) {
  bool floating = false;
  bool elsewhere = false;
  visit_tensors(arguments, [&](const at::Tensor& tensor) {
    floating = floating || tensor.is_floating_point() || tensor.is_complex();
    elsewhere = elsewhere || !tensor.is_cpu();
  });
  return floating && !elsewhere;
}

/// Makes a meta tensor with the sizes, strides and type of `tensor`. The wrapped-number flag is
/// copied, because it affects type promotion.
at::Tensor on_meta(const at::Tensor& tensor) {
  at::Tensor meta =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
  if (tessera::detail::is_wrapped_number(tensor)) {
    tessera::detail::make_wrapped_number(meta);
  }
  return meta;
}

void replace_tensors(std::span<c10::IValue> values, at::Tensor (*replacement)(const at::Tensor&)) {
  for (c10::IValue& value : values) {
    value = with_tensors(value, replacement);
  }
}

/// Allocates a CPU tensor with the properties of the tensor `meta`. Integers are set to zero,
/// because zero is a valid index.
at::Tensor allocated(const at::Tensor& meta) {
  at::Tensor tensor =
      at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(c10::kCPU));
  return tensor.is_floating_point() || tensor.is_complex() ? tensor : tensor.zero_();
}

/// Runs an operator on the meta device. The meta results replace the arguments on the stack.
void run_on_meta(const c10::OperatorHandle& op, Stack& stack) {
  const tessera::detail::ExcludeKeys not_here(kFakeModeKey);
  const auto arguments = std::span(stack).last(op.schema().arguments().size());
  replace_tensors(arguments, on_meta);
  for (c10::IValue& argument : arguments) {
    if (argument.isDevice()) {
      argument = c10::Device(c10::kMeta);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
}

void run_functional(const c10::OperatorHandle& op, Stack& stack) {
  run_on_meta(op, stack);
  replace_tensors(std::span(stack).last(op.schema().returns().size()), allocated);
}

template <class Wanted>
Stack arguments_of(const c10::OperatorHandle& op, const Stack& stack, const Wanted& wanted) {
  const auto& declared = op.schema().arguments();
  const Arguments given = torch::jit::last(stack, declared.size());
  Stack found;
  for (std::size_t i = 0; i < declared.size(); ++i) {
    if (wanted(declared[i])) {
      found.push_back(given[i]);
    }
  }
  return found;
}

bool is_input(const c10::Argument& argument) {
  return !argument.is_out();
}

FakeCall call_of(const c10::OperatorHandle& op, const Stack& stack) {
  return {.name = op.schema().name(),
          .arguments = torch::jit::last(stack, op.schema().arguments().size()).vec(),
          .inputs = tensors_of(arguments_of(op, stack, is_input)),
          .results = {}};
}

void return_written(const c10::OperatorHandle& op, Stack& stack, const Stack& written) {
  torch::jit::drop(stack, op.schema().arguments().size());
  for (std::size_t i = 0; i < op.schema().returns().size(); ++i) {
    stack.push_back(written[i]);
  }
}

Sizes pointwise_sizes(const c10::OperatorHandle& op, const Stack& stack) {
  Sizes sizes;
  for (const c10::IValue& value : arguments_of(op, stack, is_input)) {
    if (value.isTensor() && value.toTensor().defined()) {
      sizes = at::infer_size(sizes, value.toTensor().sizes());
    }
  }
  return sizes;
}

/// Returns the sizes to which an operator's out= arguments must be resized.
std::vector<Sizes> out_sizes(const c10::OperatorHandle& op, Stack& stack) {
  const std::size_t results = op.schema().returns().size();
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::Meta) && op.hasTag(at::Tag::pointwise)) {
    return {results, pointwise_sizes(op, stack)};
  }
  Stack meta(stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size()),
             stack.end());
  // The meta call gets empty out= tensors: libtorch warns if it resizes a tensor with elements.
  for (std::size_t i = 0; i < meta.size(); ++i) {
    if (op.schema().arguments()[i].is_out() && meta[i].isTensor()) {
      meta[i] = at::empty_strided({0}, {1}, meta[i].toTensor().options());
    }
  }
  run_on_meta(op, meta);
  std::vector<Sizes> sizes;
  for (const c10::IValue& result : torch::jit::last(meta, results)) {
    sizes.push_back(result.toTensor().sizes().vec());
  }
  return sizes;
}

void run_out(const c10::OperatorHandle& op, Stack& stack) {
  const Stack written = arguments_of(op, stack, writes);
  const std::vector<Sizes> sizes = out_sizes(op, stack);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (const at::Tensor& out = written[i].toTensor(); out.sizes() != sizes[i]) {
      out.resize_(sizes[i]);
    }
  }
  return_written(op, stack, written);
}

/// Handles an operator in a FakeMode. Autograd has already recorded the call.
void run_fake(const c10::OperatorHandle& op, FakeKind kind, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const bool observed = mode.load()->observer != nullptr;
  const Stack written = arguments_of(op, stack, writes);
  FakeCall call;
  if (observed) {
    call = call_of(op, stack);
    call.results = tensors_of(written);
  }
  switch (kind) {
    case FakeKind::kOut:
      run_out(op, stack);
      break;
    case FakeKind::kInPlace:
      return_written(op, stack, written);
      break;
    case FakeKind::kOwnRule:
      make_fake_results(op, stack);
      break;
    default:
      run_functional(op, stack);
  }
  if (observed) {
    if (written.empty()) {
      call.results = tensors_of(std::span(stack).last(op.schema().returns().size()));
    }
    mode.load()->observer(call);
  }
}

/// Makes an operator's results by a rule that was passed to the FakeMode. Returns false if there is
/// no rule for the operator.
bool run_given_rule(const c10::OperatorHandle& op, Stack& stack) {
  const Mode& current = *mode.load();
  if (current.rules.empty()) {
    return false;
  }
  const auto rule = current.rules.find(op.schema().name());
  if (rule == current.rules.end()) {
    return false;
  }
  FakeCall call = call_of(op, stack);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  call.results = rule->second(call);
  TESSERA_CHECK(call.results.size() == op.schema().returns().size(), "the rule for ", call.name,
                " returned ", call.results.size(), " tensors, but the operator returns ",
                op.schema().returns().size());
  torch::jit::drop(stack, op.schema().arguments().size());
  stack.insert(stack.end(), call.results.begin(), call.results.end());
  if (current.observer) {
    current.observer(call);
  }
  return true;
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (run_given_rule(op, *stack)) {
    return;
  }
  const FakeKind kind = fake_kind(op);
  if (kind == FakeKind::kThrough ||
      !is_fake(std::span(*stack).last(op.schema().arguments().size()))) {
    return op.redispatchBoxed(
        keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kFakeModeKey), stack);
  }
  TESSERA_CHECK(kind != FakeKind::kUnknown, op.operator_name(),
                " returns sizes that depend on values, and a plan has no values; set the results "
                "in planning::PlanOptions::data_dependent, under \"",
                op.schema().name(), "\" (docs/planning.md)");
  if (kind == FakeKind::kItem) {
    torch::jit::drop(*stack, 1);
    stack->emplace_back(1.0);
    return;
  }
  run_fake(op, kind, *stack);
}

TORCH_LIBRARY_IMPL(_, TESSERA_FAKE_MODE_KEY, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

/// FakeMode's kernel for operators with separate CPU and CUDA kernels and a composite
/// implementation. Otherwise libtorch would use the composite implementation.
TORCH_LIBRARY_IMPL(aten, TESSERA_FAKE_MODE_KEY, library) {
  for (const char* name : {"copy_", "convolution", "convolution_backward", "native_group_norm",
                           "native_layer_norm", "_grouped_mm"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
  }
}

}  // namespace

FakeMode::FakeMode(c10::DeviceType device, Observer observer, std::map<std::string, FakeRule> rules)
    : included_(kFakeModeKey) {
  const Mode* expected = nullptr;
  auto own = std::make_unique<const Mode>(Mode{device, std::move(observer), std::move(rules)});
  TESSERA_CHECK(mode.compare_exchange_strong(expected, own.get()),
                "a FakeMode exists already; destroy that FakeMode first");
  static_cast<void>(own.release());
}

FakeMode::~FakeMode() {
  delete mode.exchange(nullptr);
}

bool in_fake_mode() {
  return tessera::detail::is_included(kFakeModeKey);
}

void observe_fake_call(const FakeCall& call) {
  const Mode* current = mode.load();
  if (current != nullptr && current->observer != nullptr) {
    current->observer(call);
  }
}

c10::DeviceType fake_device() {
  const Mode* current = mode.load();
  return current == nullptr ? c10::DeviceType::CPU : current->device;
}

bool runs_on_cuda(const at::Tensor& x) {
  return x.is_cuda() || (x.is_cpu() && fake_device() == c10::DeviceType::CUDA);
}

}  // namespace tessera::kernels
