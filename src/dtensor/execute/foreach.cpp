#include "execute/foreach.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <iterator>
#include <unordered_map>

namespace tessera::detail {
namespace {

/// The tensor that `tensor` is a view of, however indirectly, or itself. Asked of autograd's record
/// of views, which the wrappers have on every rank alike: whether local tensors share memory
/// depends on their sizes.
const void* base_of(const at::Tensor& tensor) {
  const auto* views = torch::autograd::impl::get_view_autograd_meta(tensor);
  const at::TensorBase* base = &tensor;
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

/// The tensors of all lists; in the first `written` of them stand those that are written.
struct Uses {
  std::vector<Use> all;
  std::size_t written = 0;
};

/// Numbers the tensors as bind_call does, to find each one's input in the plan. The first list is
/// the one that is written (OperatorInfo::writes_lists).
Uses uses_of(const PlannedCall& call) {
  Uses uses;
  std::size_t number = 0;
  for (const c10::IValue& argument : call.arguments()) {
    if (argument.isTensor() && argument.toTensor().defined()) {
      ++number;
    }
    if (!argument.isTensorList()) {
      continue;
    }
    std::size_t position = 0;
    for (const at::Tensor& tensor : argument.toTensorVector()) {
      const CallPlan::Input& input = call.plan.inputs[number++];
      const bool copied = input.plan || input.written != nullptr || input.detached;
      uses.all.push_back({base_of(tensor), position++, copied});
    }
    if (uses.written == 0) {
      uses.written = uses.all.size();
    }
  }
  return uses;
}

/// 0 of an inference tensor, which counts none.
std::uint32_t version_in(const at::Tensor& tensor) {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

/// The wrapper of a distributed tensor shares the counter of its local tensor, so one bump is seen
/// through both.
void bump_version(const at::Tensor& tensor) {
  tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

/// Uses at one position, and uses of the caller's own memory, are the kernel's affair, which does
/// there what it does without us. Only a copy hides a write from another position.
bool positions_depend(const PlannedCall& call) {
  const Uses uses = uses_of(call);
  std::unordered_multimap<const void*, const Use*> written;
  for (std::size_t i = 0; i < uses.written; ++i) {
    written.emplace(uses.all[i].base, &uses.all[i]);
  }
  return std::ranges::any_of(uses.all, [&](const Use& use) {
    const auto [first, last] = written.equal_range(use.base);
    return std::any_of(first, last, [&](const auto& other) {
      return other.second->position != use.position && (other.second->copied || use.copied);
    });
  });
}

ForeachVersionCounts::ForeachVersionCounts(const PlannedCall& call) {
  if (!call.info.writes_lists) {
    return;
  }
  const auto tensors = call.argument(0).toTensorVector();
  std::ranges::transform(tensors, std::back_inserter(written_), [](const at::Tensor& tensor) {
    return Written{tensor, version_in(tensor)};
  });
}

void ForeachVersionCounts::bump() const {
  // All are compared before the first is bumped: tensors may share a counter.
  std::vector<const at::Tensor*> unbumped;
  for (const Written& written : written_) {
    if (version_in(written.tensor) == written.version) {
      unbumped.push_back(&written.tensor);
    }
  }
  for (const at::Tensor* tensor : unbumped) {
    bump_version(*tensor);
  }
}

// One version stands for all, so that a call on hundreds of parameters reads one counter.
DirectForeachVersionCounts::DirectForeachVersionCounts(at::TensorList tensors)
    : tensors_(tensors), version_(tensors.empty() ? 0 : version_in(tensors.front())) {}

void DirectForeachVersionCounts::bump() const {
  if (tensors_.empty() || version_in(tensors_.front()) != version_) {
    return;
  }
  for (const at::Tensor& tensor : tensors_) {
    bump_version(tensor);
  }
}

}  // namespace tessera::detail
