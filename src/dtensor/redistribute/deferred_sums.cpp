// Sums that tensor parallelism still needs for many small gradients, in one all-reduce. FSDP's
// reduction of a group adds them (fsdp/parameter_group/gradient_reduction.cpp); the object is in
// the context that its units share.

#include "tessera/dtensor/detail/deferred_sums.h"

#include <ATen/ops/cat.h>

#include <algorithm>

#include "tessera/comm/communicator.h"
#include "tessera/comm/trace.h"
#include "tessera/dtensor/detail/flush_pending_transfers.h"
#include "tessera/dtensor/sharding_spec.h"

namespace tessera::detail {

comm::Communicator* pending_sum_group(const at::Tensor& gradient, const at::Tensor& leaf) {
  const ShardingSpec& from = sharding_spec(gradient);
  const ShardingSpec& to = sharding_spec(leaf);
  const std::vector<PartialDim>& partial = from.layout->partial();
  // Layouts are interned: comparing what is left without the partial is comparing pointers. A mean
  // or a product is not added up with others.
  const bool only_sum = partial.size() == 1 && partial[0].op == ReduceOp::kSum &&
                        Layout::intern(from.layout->mesh_sizes(), from.layout->dims()) == to.layout;
  return only_sum ? &from.mesh.group(partial[0].mesh_dim) : nullptr;
}

void DeferredSums::add(comm::Communicator& group, at::Tensor value, Then then, const void* owner) {
  // One call reduces one type. A job has few groups and types, so the search is linear.
  const auto same = [&](const Bucket& bucket) {
    return bucket.group == &group && bucket.dtype == value.scalar_type();
  };
  auto bucket = std::ranges::find_if(buckets_, same);
  if (bucket == buckets_.end()) {
    bucket = buckets_.insert(buckets_.end(), Bucket{&group, value.scalar_type(), {}});
  }
  bucket->terms.push_back({std::move(value), std::move(then), owner});
}

void DeferredSums::forget(const void* owner) {
  for (Bucket& bucket : buckets_) {
    std::erase_if(bucket.terms, [owner](const Term& term) { return term.owner == owner; });
  }
  std::erase_if(buckets_, [](const Bucket& bucket) { return bucket.terms.empty(); });
}

void DeferredSums::run() {
  // Taken out first: a `then` may add(), and what failed is not sent again.
  const std::vector<Bucket> buckets = std::exchange(buckets_, {});
  std::ranges::for_each(buckets, [](const Bucket& bucket) { run(bucket); });
}

/// Ranks identify a term by its place alone: they must have added in one order. Costs one copy;
/// each `then` gets a view of the sums.
void DeferredSums::run(const Bucket& bucket) {
  std::vector<at::Tensor> flat;
  for (const Term& term : bucket.terms) {
    flat.push_back(term.value.reshape({-1}));
  }
  const at::Tensor sums = at::cat(flat);
  const comm::CallerScope caller("sum of the gradients of replicated parameters");
  flush_pending_transfers(*bucket.group).all_reduce(sums, ReduceOp::kSum)->wait();
  std::int64_t offset = 0;
  for (const Term& term : bucket.terms) {
    const std::int64_t numel = term.value.numel();
    term.then(sums.narrow(0, offset, numel).view(term.value.sizes()));
    offset += numel;
  }
}

}  // namespace tessera::detail
