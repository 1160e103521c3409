#include "tessera/dtensor/deferred_sums.h"

#include <ATen/ops/cat.h>

#include <algorithm>

#include "tessera/comm/communicator.h"
#include "tessera/dtensor/in_order.h"

namespace tessera {

void DeferredSums::add(comm::Communicator& group, at::Tensor value, Then then, const void* owner) {
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
  const std::vector<Bucket> buckets = std::exchange(buckets_, {});
  std::ranges::for_each(buckets, [](const Bucket& bucket) { run(bucket); });
}

void DeferredSums::run(const Bucket& bucket) {
  std::vector<at::Tensor> flat;
  for (const Term& term : bucket.terms) {
    flat.push_back(term.value.reshape({-1}));
  }
  const at::Tensor sums = at::cat(flat);
  in_order(*bucket.group).all_reduce(sums, ReduceOp::kSum)->wait();
  std::int64_t offset = 0;
  for (const Term& term : bucket.terms) {
    const std::int64_t numel = term.value.numel();
    term.then(sums.narrow(0, offset, numel).view(term.value.sizes()));
    offset += numel;
  }
}

}  // namespace tessera
