// Under sequence parallelism the gradient of a replicated parameter is a pending sum over the
// tensor-parallel ranks, taken after the reduction, on shards. But a rank without tokens gets zeros
// in any layout, and one that skipped the module gets nothing: without an agreement it would not
// sum its shard, which holds the other ranks' terms.

#include "parameter/pending_sum.h"

#include <algorithm>
#include <utility>

namespace tessera::fsdp {

UnshardedGradient converted(UnshardedGradient gradient, comm::Communicator* pending) {
  if (gradient.pending == pending) {
    return gradient;
  }
  if (gradient.pending != nullptr) {
    // A copy: hooks of the user may hold autograd's tensor.
    gradient.local = gradient.local.clone(at::MemoryFormat::Contiguous);
    gradient.pending->all_reduce(gradient.local, ReduceOp::kSum)->wait();
  }
  // Every rank of the group has all of it: only rank 0 adds it to the sum.
  if (pending != nullptr && pending->rank() != 0) {
    gradient.local.reset();
  }
  gradient.pending = pending;
  return gradient;
}

void add_gradient(UnshardedGradient& sum, const UnshardedGradient& gradient,
                  c10::ScalarType dtype) {
  sum.used |= gradient.used;
  if (!gradient.local.defined()) {
    return;
  }
  if (!sum.local.defined()) {
    // No copy if the type agrees: it was taken off its parameter.
    sum = {gradient.local.to(dtype), gradient.pending, sum.used, gradient.divisor};
    return;
  }
  comm::Communicator* pending = sum.pending != nullptr ? sum.pending : gradient.pending;
  sum = converted(std::move(sum), pending);
  const at::Tensor term = converted(gradient, pending).local;
  if (!sum.local.defined()) {
    sum.local = term.to(dtype);  // the sum was complete and another rank has it
    sum.divisor = gradient.divisor;
  } else if (term.defined()) {
    sum.local.add_(term, gradient.divisor / sum.divisor);
  }
}

PendingSum::PendingSum(const std::optional<ShardingSpec>& spec) {
  if (!spec) {
    return;
  }
  for (int dim = 0; dim < spec->mesh.ndim(); ++dim) {
    if (spec->layout->sharded_dim(dim) < 0 && spec->mesh.size(dim) > 1) {
      possible_.push_back(&spec->mesh.group(dim));
    }
  }
  if (!possible_.empty()) {
    group_ = possible_.front();
  }
}

void PendingSum::note(const UnshardedGradient& gradient) {
  if (gradient.pending != nullptr) {
    came_ = gradient.pending;
  }
}

std::vector<std::uint8_t> PendingSum::flags() const {
  std::vector<std::uint8_t> flags;
  for (const comm::Communicator* group : possible_) {
    flags.push_back(group == came_ ? 1 : 0);
  }
  return flags;
}

void PendingSum::agree(std::span<const std::uint8_t> flags) {
  // What comes otherwise is converted.
  const auto found = std::ranges::find(flags, 1);
  group_ =
      found == flags.end() ? nullptr : possible_[static_cast<std::size_t>(found - flags.begin())];
  possible_.clear();
}

}  // namespace tessera::fsdp
