#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <map>
#include <numeric>
#include <utility>

#include "grad_terms.h"
#include "tessera/dtensor/in_order.h"

namespace tessera::optim {
namespace {

constexpr auto kDouble = c10::ScalarType::Double;

/// The norm of each tensor, fp64 (n) on `device`.
at::Tensor norms(const std::vector<at::Tensor>& tensors, double p, c10::Device device) {
  std::map<std::pair<c10::DeviceType, c10::ScalarType>, std::vector<at::Tensor>> lists;
  for (const at::Tensor& tensor : tensors) {
    lists[{tensor.device().type(), tensor.scalar_type()}].push_back(tensor);
  }
  std::vector<at::Tensor> found;
  for (const auto& [kind, list] : lists) {
    const auto type = kind.second == kDouble ? kDouble : c10::ScalarType::Float;
    found.push_back(at::stack(at::_foreach_norm(list, p, type)).to(device, kDouble));
  }
  return at::cat(found);
}

/// What adds up over ranks: the sum of |x|^p, or for p = infinity max |x|; 0-d.
at::Tensor local_term(const std::vector<at::Tensor>& tensors, double p, c10::Device device) {
  if (tensors.empty()) return at::zeros({}, at::dtype(kDouble).device(device));
  const at::Tensor each = norms(tensors, p, device);
  return std::isinf(p) ? each.max() : each.pow(p).sum();
}

void all_reduce(const DeviceMesh& mesh, const at::Tensor& values, ReduceOp op) {
  if (mesh.size() == 1) return;
  std::vector<int> dims(static_cast<std::size_t>(mesh.ndim()));
  std::iota(dims.begin(), dims.end(), 0);
  in_order(mesh.group(dims)).all_reduce(values, op)->wait();
}

/// The maximum over all ranks. Back ends differ in whether a maximum keeps a NaN, so that it
/// travels beside the value.
at::Tensor reduce_max(const DeviceMesh& mesh, const at::Tensor& value) {
  const at::Tensor nan = value.isnan();
  const at::Tensor pair = at::stack({value.masked_fill(nan, 0.0), nan.to(kDouble)});
  all_reduce(mesh, pair, ReduceOp::kMax);
  return pair[0].masked_fill(pair[1].gt(0.0), std::nan(""));
}

at::Tensor reduce_sum(const DeviceMesh& mesh, at::Tensor value) {
  all_reduce(mesh, value, ReduceOp::kSum);
  return value;
}

/// Where the joint mesh communicates; without one, where the parameters lie.
c10::Device home(const GradTerms& terms) {
  const c10::Device first = terms.device.value_or(c10::kCPU);
  if (!terms.joint || terms.joint.size() == 1) return first;
  const c10::Device device(terms.joint.device_type());
  return device.type() == first.type() ? first : device;
}

}  // namespace

at::Tensor total_norm(const GradTerms& terms, double p) {
  const c10::Device device = home(terms);
  at::Tensor owned = local_term(terms.owned, p, device);
  const at::Tensor plain = local_term(terms.plain, p, device);
  const bool max = std::isinf(p);
  if (terms.joint) {
    // Copies should not differ, but a value that isn't finite on one rank alone must be seen by
    // all: they skip a step, or stop, together.
    const at::Tensor uncounted = plain + local_term(terms.copies, p, device);
    const at::Tensor not_finite = uncounted.masked_fill(uncounted.isfinite(), 0.0);
    owned = max ? reduce_max(terms.joint, at::maximum(owned, not_finite))
                : reduce_sum(terms.joint, owned + not_finite);
  }
  return max ? at::maximum(owned, plain) : (owned + plain).pow(1.0 / p);
}

}  // namespace tessera::optim
