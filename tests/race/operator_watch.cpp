#include "race/operator_watch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>

namespace tessera::race {
namespace {

thread_local RaceChecker* watching = nullptr;

/// Whether `name` contains one of `parts`. For properties of operators that schemas do not state.
bool any_in(std::string_view name, std::initializer_list<std::string_view> parts) {
  return std::ranges::any_of(
      parts, [&](std::string_view part) { return name.find(part) != std::string_view::npos; });
}

bool reads_nothing(std::string_view name) {
  return any_in(name, {"_like", "new_", "empty", "same_size", "size", "stride", "resize_",
                       "requires_grad", "detach_", "set_", "_version", "retain_grad"});
}

/// Whether an operator only allocates memory, or only changes a tensor's storage or flags.
bool writes_nothing(std::string_view name) {
  return any_in(name, {"empty", "resize_", "requires_grad", "detach_", "set_", "retain_grad"});
}

/// Whether an operator overwrites its argument without reading the old values.
bool overwrites(std::string_view name) {
  return any_in(name, {"copy_", "zero_", "fill_", "uniform_", "normal_", "random_"});
}

void add_tensors(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      add_tensors(element, tensors);
    }
  }
}

struct Call final : at::ObserverContext {
  std::vector<Range> reads;
  std::vector<Range> writes;
};

void look_at_inputs(const at::RecordFunction& function, Call& call) {
  const auto schema = function.operator_schema();
  if (!schema) {
    return;
  }
  const std::string_view name = function.name();
  std::vector<at::Tensor> read, written;
  const auto inputs = function.inputs();
  for (std::size_t i = 0; i < inputs.size() && i < schema->arguments().size(); ++i) {
    const c10::Argument& argument = schema->arguments()[i];
    std::vector<at::Tensor> tensors;
    add_tensors(inputs[i], tensors);
    const bool changes = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (changes && !writes_nothing(name)) {
      written.insert(written.end(), tensors.begin(), tensors.end());
    }
    // A view's argument has alias_info, but is not read. An out= argument is written, but not read.
    const bool reads =
        changes ? !argument.is_out() && !overwrites(name) : argument.alias_info() == nullptr;
    if (reads && !reads_nothing(name)) {
      read.insert(read.end(), tensors.begin(), tensors.end());
    }
  }
  call.reads = memory_of(read);
  call.writes = memory_of(written);
}

/// Records writes to results in new memory. Results with alias_info share memory with arguments.
void look_at_outputs(const at::RecordFunction& function, Call& call) {
  const auto schema = function.operator_schema();
  std::vector<at::Tensor> results;
  const std::vector<c10::IValue>& outputs = function.outputs();
  for (std::size_t i = 0; i < outputs.size() && i < schema->returns().size(); ++i) {
    if (schema->returns()[i].alias_info() == nullptr) {
      add_tensors(outputs[i], results);
    }
  }
  if (!writes_nothing(function.name())) {
    const std::vector<Range> made = memory_of(results);
    call.writes.insert(call.writes.end(), made.begin(), made.end());
  }
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  if (watching == nullptr) {
    return nullptr;
  }
  auto call = std::make_unique<Call>();
  look_at_inputs(function, *call);
  return call;
}

void end(const at::RecordFunction& function, at::ObserverContext* context) {
  auto* call = static_cast<Call*>(context);
  if (watching == nullptr || call == nullptr || !function.operator_schema()) {
    return;
  }
  look_at_outputs(function, *call);
  watching->run(function.name(), call->reads, call->writes);
}

}  // namespace

std::vector<Range> memory_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Range> ranges;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0 ||
        tensor.storage().data() == nullptr) {
      continue;
    }
    // libtorch wraps a number argument in a CPU tensor. Such tensors cannot have races.
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      continue;
    }
    std::int64_t last = 0;
    for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
      last += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
    const auto begin = reinterpret_cast<std::uintptr_t>(tensor.storage().data()) +
                       static_cast<std::uintptr_t>(tensor.storage_offset()) * tensor.itemsize();
    ranges.push_back({begin, begin + static_cast<std::uintptr_t>(last + 1) * tensor.itemsize()});
  }
  return ranges;
}

OperatorWatch::OperatorWatch(RaceChecker& checker)
    : callback_(at::addThreadLocalCallback(at::RecordFunctionCallback(&begin, &end)
                                               .needsInputs(true)
                                               .needsOutputs(true)
                                               .scopes({at::RecordScope::FUNCTION}))) {
  watching = &checker;
}

OperatorWatch::~OperatorWatch() {
  watching = nullptr;
  at::removeCallback(callback_);
}

OperatorPause::OperatorPause() : outer_(std::exchange(watching, nullptr)) {}

OperatorPause::~OperatorPause() {
  watching = outer_;
}

}  // namespace tessera::race
