#include "execute/foreach.h"

#include <algorithm>
#include <iterator>
#include <unordered_map>

#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {
namespace {

/// The tensor that `tensor` is a view of, directly or not, or itself. By autograd's record of
/// views, which is the same on every rank: whether local tensors share memory depends on their
/// sizes.
const void* base_of(const at::Tensor& tensor) {
  return identity_of(viewed_by(tensor));
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

}  // namespace

/// Uses at one position, and uses of the caller's own memory, work as in the kernel alone. Only a
/// copy hides a write from another position.
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
    return Written{tensor, writes_of(tensor)};
  });
}

void ForeachVersionCounts::bump() const {
  // All are compared before the first is bumped: tensors may share a counter, as a wrapper and its
  // local tensor do.
  std::vector<const at::Tensor*> unbumped;
  for (const Written& written : written_) {
    if (writes_of(written.tensor) == written.version) {
      unbumped.push_back(&written.tensor);
    }
  }
  for (const at::Tensor* tensor : unbumped) {
    count_write(*tensor);
  }
}

// One version stands for all, so that a call on hundreds of parameters reads one counter.
DirectForeachVersionCounts::DirectForeachVersionCounts(at::TensorList tensors)
    : tensors_(tensors), version_(tensors.empty() ? 0 : writes_of(tensors.front())) {}

void DirectForeachVersionCounts::bump() const {
  if (tensors_.empty() || writes_of(tensors_.front()) != version_) {
    return;
  }
  for (const at::Tensor& tensor : tensors_) {
    count_write(tensor);
  }
}

}  // namespace tessera::detail
