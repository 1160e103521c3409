#include "gloo/c10d_arguments.h"

#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/prod.h>
#include <ATen/ops/sum.h>

namespace tessera::comm {

detail::GroupReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return detail::GroupReduceOp::SUM;
    case ReduceOp::kAvg:
      return detail::GroupReduceOp::AVG;
    case ReduceOp::kMax:
      return detail::GroupReduceOp::MAX;
    case ReduceOp::kMin:
      return detail::GroupReduceOp::MIN;
    case ReduceOp::kProduct:
      return detail::GroupReduceOp::PRODUCT;
  }
  return detail::GroupReduceOp::SUM;
}

std::vector<std::int64_t> counts_in_bytes(std::span<const std::int64_t> counts,
                                          std::size_t item_bytes) {
  std::vector<std::int64_t> result;
  for (const std::int64_t count : counts) {
    result.push_back(count * static_cast<std::int64_t>(item_bytes));
  }
  return result;
}

/// at::sum() and at::prod() add in fp32 where the type has 16 bits, and round once at the end.
void reduce_rows(const at::Tensor& output, const at::Tensor& parts, ReduceOp op) {
  const at::Tensor flat = output.view({-1});
  switch (op) {
    case ReduceOp::kSum:
      flat.copy_(at::sum(parts, {0}, false, parts.scalar_type()));
      return;
    case ReduceOp::kAvg:
      flat.copy_(at::sum(parts, {0}, false, parts.scalar_type()).div_(parts.size(0)));
      return;
    case ReduceOp::kMax:
      flat.copy_(at::amax(parts, {0}));
      return;
    case ReduceOp::kMin:
      flat.copy_(at::amin(parts, {0}));
      return;
    case ReduceOp::kProduct:
      flat.copy_(at::prod(parts, 0, false, parts.scalar_type()));
      return;
  }
}

/// Flat first: a scalar, which has no dimension, cannot be viewed in a type of another size.
at::Tensor as_bytes(const at::Tensor& contiguous) {
  return contiguous.view({-1}).view(at::kByte);
}

}  // namespace tessera::comm
