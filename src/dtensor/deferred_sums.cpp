#include "tessera/dtensor/deferred_sums.h"

#include <ATen/ops/cat.h>

#include <algorithm>

#include "tessera/comm/communicator.h"

namespace tessera {

void DeferredSums::add(comm::Communicator& group, at::Tensor value, Then then) {
  const auto same = [&](const Bucket& bucket) {
    return bucket.group == &group && bucket.dtype == value.scalar_type();
  };
  auto bucket = std::ranges::find_if(buckets_, same);
  if (bucket == buckets_.end()) {
    bucket = buckets_.insert(buckets_.end(), Bucket{&group, value.scalar_type(), {}, {}});
  }
  bucket->values.push_back(std::move(value));
  bucket->then.push_back(std::move(then));
}

void DeferredSums::run() {
  const std::vector<Bucket> buckets = std::exchange(buckets_, {});
  std::ranges::for_each(buckets, [](const Bucket& bucket) { run(bucket); });
}

void DeferredSums::run(const Bucket& bucket) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& value : bucket.values) {
    flat.push_back(value.reshape({-1}));
  }
  const at::Tensor sums = at::cat(flat);
  bucket.group->all_reduce(sums, ReduceOp::kSum)->wait();
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < flat.size(); ++i) {
    bucket.then[i](sums.narrow(0, offset, flat[i].numel()).view(bucket.values[i].sizes()));
    offset += flat[i].numel();
  }
}

}  // namespace tessera
