#include "list_writes.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <iterator>
#include <unordered_map>

#include "distributed_impl.h"
#include "fallback.h"

namespace tessera::detail {
namespace {

bool writes_list(const OperatorInfo& info) {
  return info.returns.empty() && !info.written.empty() && info.name.starts_with("aten::_foreach_");
}

/// 0 of an inference tensor, which counts none.
std::uint32_t version_in(const at::Tensor& tensor) {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

void count_write(const at::Tensor& tensor) {
  tensor.unsafeGetTensorImpl()->bump_version();
}

/// The tensor that `tensor` is a view of, however indirectly, or itself. All ranks say the same,
/// which they might not of the memory of local tensors.
const void* viewed_by(const at::Tensor& tensor) {
  const auto* views = torch::autograd::impl::get_view_autograd_meta(tensor);
  const auto* base = &tensor;
  if (views != nullptr && views->has_bw_view()) {
    base = &views->get_backward_view().base_;
  } else if (views != nullptr && views->has_fw_view()) {
    base = &views->get_forward_view().base_;
  }
  return base->unsafeGetTensorImpl();
}

/// A tensor of a list argument.
struct Use {
  const void* base;
  std::size_t position;
  bool copied;  ///< the kernel gets a copy of it
};

bool is_detached_view(const at::Tensor& tensor) {
  const auto* impl = as_distributed(tensor);
  return impl != nullptr && impl->detached_view() != nullptr;
}

bool is_copied_in(const CallPlan::Input& input) {
  return input.plan || input.written != nullptr;
}

bool copies_any(const CallPlan& plan, std::span<const c10::IValue> arguments) {
  const auto holds_detached = [](const c10::IValue& argument) {
    return argument.isTensorList() &&
           std::ranges::any_of(argument.toListRef(), [](const c10::IValue& element) {
             return is_detached_view(element.toTensor());
           });
  };
  return std::ranges::any_of(plan.inputs, is_copied_in) ||
         std::ranges::any_of(arguments, holds_detached);
}

/// The tensors of all lists; in the first `written` of them stand those that are written.
struct Uses {
  std::vector<Use> all;
  std::size_t written = 0;
};

Uses uses_of(const CallPlan& plan, std::span<const c10::IValue> arguments) {
  Uses uses;
  std::size_t number = 0;
  for (const auto& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined()) ++number;
    if (!argument.isTensorList()) continue;
    std::size_t position = 0;
    for (const auto& tensor : argument.toTensorVector()) {
      const bool copied = is_copied_in(plan.inputs[number++]) || is_detached_view(tensor);
      uses.all.push_back({viewed_by(tensor), position++, copied});
    }
    if (uses.written == 0) uses.written = uses.all.size();
  }
  return uses;
}

bool is_list_of(const c10::IValue& value, std::size_t size) {
  return value.isList() && value.toListRef().size() == size;
}

/// An argument of the call of one position: its element of a list, or of a tensor of numbers.
c10::IValue element_of(const c10::IValue& value, std::size_t position, std::size_t count) {
  if (value.isTensor() && value.toTensor().dim() == 1) {
    return value.toTensor().narrow(0, static_cast<std::int64_t>(position), 1);
  }
  if (!is_list_of(value, count)) return value;
  const auto list = value.toList();
  c10::impl::GenericList one(list.elementType());
  one.push_back(value.toListRef()[position]);
  return one;
}

}  // namespace

ListWrites::ListWrites(const OperatorInfo& info, std::span<const c10::IValue> arguments) {
  if (!writes_list(info)) return;
  const auto tensors = arguments.front().toTensorVector();
  std::ranges::transform(tensors, std::back_inserter(written_), [](const at::Tensor& tensor) {
    return Written{tensor, version_in(tensor)};
  });
}

bool ListWrites::Written::counted() const {
  return version_in(tensor) != version;
}

void ListWrites::count() const {
  std::vector<const Written*> uncounted;
  for (const auto& written : written_) {
    if (!written.counted()) uncounted.push_back(&written);
  }
  for (const auto* written : uncounted) count_write(written->tensor);
}

DirectListWrites::DirectListWrites(at::TensorList tensors)
    : tensors_(tensors), version_(tensors.empty() ? 0 : version_in(tensors.front())) {}

void DirectListWrites::count() const {
  if (tensors_.empty() || version_in(tensors_.front()) != version_) return;
  for (const auto& tensor : tensors_) count_write(tensor);
}

bool goes_by_position(const OperatorInfo& info, const CallPlan& plan,
                      std::span<const c10::IValue> arguments) {
  if (!writes_list(info) || !copies_any(plan, arguments)) return false;
  const auto uses = uses_of(plan, arguments);
  std::unordered_multimap<const void*, const Use*> written;
  for (std::size_t i = 0; i < uses.written; ++i) written.emplace(uses.all[i].base, &uses.all[i]);
  return std::ranges::any_of(uses.all, [&](const Use& use) {
    const auto [first, last] = written.equal_range(use.base);
    return std::any_of(first, last, [&](const auto& other) {
      return other.second->position != use.position && (other.second->copied || use.copied);
    });
  });
}

void run_by_position(const c10::OperatorHandle& op, const OperatorInfo& info,
                     torch::jit::Stack& stack) {
  const auto first = stack.end() - static_cast<std::ptrdiff_t>(info.arguments.size());
  const std::vector<c10::IValue> arguments(first, stack.end());
  stack.erase(first, stack.end());
  const auto count = arguments.front().toListRef().size();
  for (std::size_t position = 0; position < count; ++position) {
    torch::jit::Stack call;
    for (const auto& value : arguments) call.push_back(element_of(value, position, count));
    dispatch(op, call);
  }
}

}  // namespace tessera::detail
