// A dispatch key between autograd and the CPU's kernels, which libtorch leaves to others and only a
// FakeMode includes: every operator that a program runs arrives here, with local tensors.

#include "tessera/kernels/fake_mode.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <span>
#include <utility>

#include "fake/fake_observer.h"
#include "fake/fake_operators.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/kernels/detail/tensors_in_values.h"

namespace tessera::kernels {
namespace {

using tessera::detail::kFakeModeKey;
using torch::jit::Stack;

struct Mode {
  c10::DeviceType device;
  FakeMode::Observer observer;
};

/// The one in force.
std::atomic<const Mode*> mode = nullptr;

std::vector<at::Tensor> tensors_of(std::span<const c10::IValue> values) {
  std::vector<at::Tensor> tensors;
  visit_tensors(values, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

/// Whether the call involves values that do not exist: of any floating-point tensor of the CPU.
bool is_fake(std::span<const c10::IValue> arguments) {
  bool floating = false;
  bool elsewhere = false;
  visit_tensors(arguments, [&](const at::Tensor& tensor) {
    floating = floating || tensor.is_floating_point() || tensor.is_complex();
    elsewhere = elsewhere || !tensor.is_cpu();
  });
  return floating && !elsewhere;
}

/// The same sizes, strides and type; a wrapped number stays one, since it decides types otherwise.
at::Tensor on_meta(const at::Tensor& tensor) {
  at::Tensor meta =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
  if (tessera::detail::is_wrapped_number(tensor)) {
    tessera::detail::make_wrapped_number(meta);
  }
  return meta;
}

/// Puts `replacement(tensor)` in the place of each tensor of `values`.
void replace_tensors(std::span<c10::IValue> values, at::Tensor (*replacement)(const at::Tensor&)) {
  for (c10::IValue& value : values) {
    value = with_tensors(value, replacement);
  }
}

at::Tensor allocated(const at::Tensor& meta) {
  return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(c10::kCPU));
}

/// Runs the call on the meta device: leaves its results on the stack.
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

/// The arguments that a schema says are written: the results of a call in place.
Stack written_arguments(const c10::OperatorHandle& op, const Stack& stack) {
  const auto& arguments = op.schema().arguments();
  Stack written;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite()) {
      written.push_back(stack[stack.size() - arguments.size() + i]);
    }
  }
  return written;
}

/// The tensors that the call reads, or reads and writes.
std::vector<at::Tensor> inputs_of(const c10::OperatorHandle& op, const Stack& stack) {
  const auto& arguments = op.schema().arguments();
  Stack inputs;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].is_out()) {
      inputs.push_back(stack[stack.size() - arguments.size() + i]);
    }
  }
  return tensors_of(inputs);
}

/// `written` in place of the arguments, if the operator returns them.
void return_written(const c10::OperatorHandle& op, Stack& stack, const Stack& written) {
  torch::jit::drop(stack, op.schema().arguments().size());
  for (std::size_t i = 0; i < op.schema().returns().size(); ++i) {
    stack.push_back(written[i]);
  }
}

/// Those of the arguments that are not out=, broadcast.
std::vector<std::int64_t> pointwise_sizes(const c10::OperatorHandle& op, Stack& stack) {
  const std::size_t count = op.schema().arguments().size();
  std::vector<std::int64_t> sizes;
  for (std::size_t i = 0; i < count; ++i) {
    const c10::IValue& value = stack[stack.size() - count + i];
    if (value.isTensor() && value.toTensor().defined() && !op.schema().arguments()[i].is_out()) {
      sizes = at::infer_size(sizes, value.toTensor().sizes());
    }
  }
  return sizes;
}

/// The sizes of each out= argument after the call. An operator on elements may have no meta kernel.
std::vector<std::vector<std::int64_t>> out_sizes(const c10::OperatorHandle& op, Stack& stack) {
  const std::size_t results = op.schema().returns().size();
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::Meta) && op.hasTag(at::Tag::pointwise)) {
    return {results, pointwise_sizes(op, stack)};
  }
  Stack meta(stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size()),
             stack.end());
  run_on_meta(op, meta);
  std::vector<std::vector<std::int64_t>> sizes;
  for (const c10::IValue& result : torch::jit::last(meta, results)) {
    sizes.push_back(result.toTensor().sizes().vec());
  }
  return sizes;
}

/// An out= argument has any sizes before the call.
void run_out(const c10::OperatorHandle& op, Stack& stack) {
  const Stack written = written_arguments(op, stack);
  const std::vector<std::vector<std::int64_t>> sizes = out_sizes(op, stack);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (const at::Tensor& out = written[i].toTensor(); out.sizes() != sizes[i]) {
      out.resize_(sizes[i]);
    }
  }
  return_written(op, stack, written);
}

/// Without its values, and without autograd, which has seen the call.
void run_fake(const c10::OperatorHandle& op, FakeKind kind, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const std::size_t count = op.schema().arguments().size();
  const bool observed = mode.load()->observer != nullptr;
  FakeCall call;
  Stack written = written_arguments(op, stack);
  if (observed) {
    call = {.name = op.schema().name(),
            .arguments = torch::jit::last(stack, count).vec(),
            .inputs = inputs_of(op, stack),
            .results = tensors_of(written)};
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

void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const FakeKind kind = fake_kind(op);
  if (kind == FakeKind::kThrough ||
      !is_fake(std::span(*stack).last(op.schema().arguments().size()))) {
    return op.redispatchBoxed(
        keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kFakeModeKey), stack);
  }
  TESSERA_CHECK(kind != FakeKind::kUnknown, "a FakeMode came to ", op.operator_name(),
                ", whose sizes libtorch does not give without computing it; add its rule to "
                "src/kernels/fake/fake_operators.cpp");
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

/// libtorch gives the key what is composed of other operators. These are not on a CPU and on CUDA.
TORCH_LIBRARY_IMPL(aten, TESSERA_FAKE_MODE_KEY, library) {
  for (const char* name :
       {"copy_", "convolution", "convolution_backward", "native_group_norm", "native_layer_norm"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
  }
}

}  // namespace

FakeMode::FakeMode(c10::DeviceType device, Observer observer) : included_(kFakeModeKey) {
  const Mode* expected = nullptr;
  auto own = std::make_unique<const Mode>(Mode{device, std::move(observer)});
  TESSERA_CHECK(mode.compare_exchange_strong(expected, own.get()),
                "a FakeMode was begun within another one; end that first");
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

}  // namespace tessera::kernels
