#include "local_reduce.h"

#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/prod.h>
#include <ATen/ops/sum.h>

namespace tessera::comm {

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

at::Tensor as_bytes(const at::Tensor& contiguous) {
  return contiguous.view({-1}).view(at::kByte);
}

}  // namespace tessera::comm
