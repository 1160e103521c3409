#include "race/operator_watch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <string_view>

namespace tessera::race {
namespace {

thread_local RaceChecker* watching = nullptr;

/// Properties of an operator that its schema does not have.
bool any_in(std::string_view name, std::initializer_list<std::string_view> parts) {
  return std::ranges::any_of(
      parts, [&](std::string_view part) { return name.find(part) != std::string_view::npos; });
}

/// The operator reads only sizes and types.
bool reads_nothing(std::string_view name) {
  return any_in(name, {"_like", "new_", "empty", "same_size", "size", "stride", "resize_",
                       "requires_grad", "detach_", "set_", "_version", "retain_grad"});
}

/// The operator allocates memory, or changes the memory of a tensor.
bool writes_nothing(std::string_view name) {
  return any_in(name, {"empty", "resize_", "requires_grad", "detach_", "set_", "retain_grad"});
}

/// Whether the operator overwrites its argument without reading it.
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

bool is_matrix_product(std::string_view name) {
  return name == "aten::mm" || name == "aten::addmm" || name == "aten::bmm";
}

struct Call final : at::ObserverContext {
  std::vector<Range> reads;
  std::vector<Range> writes;
  std::int64_t inner = 0;  ///< the elements that a product sums over
  std::int64_t calls = 0;  ///< operators called when it began
};

thread_local std::int64_t calls = 0;

/// The number of columns of the first factor. A bias comes before the two factors.
std::int64_t inner_of(const std::vector<at::Tensor>& inputs) {
  return inputs[inputs.size() - 2].size(-1);
}

void look_at_inputs(const at::RecordFunction& function, Call& call) {
  const auto schema = function.operator_schema();
  if (!schema) {
    return;
  }
  const std::string_view name = function.name();
  std::vector<at::Tensor> read, written, all;
  const auto inputs = function.inputs();
  for (std::size_t i = 0; i < inputs.size() && i < schema->arguments().size(); ++i) {
    const c10::Argument& argument = schema->arguments()[i];
    std::vector<at::Tensor> tensors;
    add_tensors(inputs[i], tensors);
    all.insert(all.end(), tensors.begin(), tensors.end());
    const bool changes = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (changes && !writes_nothing(name)) {
      written.insert(written.end(), tensors.begin(), tensors.end());
    }
    // Views have an alias that is not written; out= arguments have one that is.
    const bool reads =
        changes ? !argument.is_out() && !overwrites(name) : argument.alias_info() == nullptr;
    if (reads && !reads_nothing(name)) {
      read.insert(read.end(), tensors.begin(), tensors.end());
    }
  }
  call.reads = memory_of(read);
  call.writes = memory_of(written);
  call.inner = is_matrix_product(name) ? inner_of(all) : 0;
}

/// Results that are neither arguments nor views of them.
void look_at_outputs(const at::RecordFunction& function, Call& call, std::int64_t& numel) {
  const auto schema = function.operator_schema();
  std::vector<at::Tensor> results;
  const std::vector<c10::IValue>& outputs = function.outputs();
  for (std::size_t i = 0; i < outputs.size() && i < schema->returns().size(); ++i) {
    if (schema->returns()[i].alias_info() == nullptr) {
      add_tensors(outputs[i], results);
    }
  }
  for (const at::Tensor& tensor : results) {
    numel += tensor.defined() ? tensor.numel() : 0;
  }
  if (!writes_nothing(function.name())) {
    const std::vector<Range> made = memory_of(results);
    call.writes.insert(call.writes.end(), made.begin(), made.end());
  }
}

double bytes_of(const Call& call) {
  double bytes = 0;
  for (const std::vector<Range>* ranges : {&call.reads, &call.writes}) {
    for (const Range& range : *ranges) {
      bytes += static_cast<double>(range.end - range.begin);
    }
  }
  return bytes;
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  if (watching == nullptr) {
    return nullptr;
  }
  auto call = std::make_unique<Call>();
  look_at_inputs(function, *call);
  call->calls = ++calls;
  return call;
}

void end(const at::RecordFunction& function, at::ObserverContext* context) {
  auto* call = static_cast<Call*>(context);
  if (watching == nullptr || call == nullptr || !function.operator_schema()) {
    return;
  }
  std::int64_t numel = 0;
  look_at_outputs(function, *call, numel);
  // The cost of a composite operator is that of its parts.
  const bool composed = call->calls != calls && call->inner == 0;
  const Costs& costs = watching->timeline().costs();
  const double microseconds = call->inner > 0
                                  ? costs.product(2.0 * static_cast<double>(call->inner * numel))
                              : composed ? 0
                                         : costs.other(bytes_of(*call));
  watching->run(function.name(), call->reads, call->writes, microseconds);
}

}  // namespace

std::vector<Range> memory_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Range> ranges;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0 ||
        tensor.storage().data() == nullptr) {
      continue;
    }
    // A number on the host.
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
