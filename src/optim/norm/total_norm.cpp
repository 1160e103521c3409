// The second half of a norm: local terms, one all-reduce, the root. In fp64: sums of squares of
// millions of small numbers.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <map>
#include <utility>

#include "norm/grad_terms.h"
#include "tessera/dtensor/detail/transfers.h"

namespace tessera::optim {
namespace {

constexpr auto kDouble = c10::ScalarType::Double;

/// The norm of each tensor, fp64 (n) on `device`. One list kernel for each type and device. Complex
/// numbers count by their absolute values, as in PyTorch.
at::Tensor norms(const std::vector<at::Tensor>& tensors, double p, c10::Device device) {
  std::map<std::pair<c10::DeviceType, c10::ScalarType>, std::vector<at::Tensor>> lists;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor real = tensor.is_complex() ? tensor.abs() : tensor;
    lists[{real.device().type(), real.scalar_type()}].push_back(real);
  }
  std::vector<at::Tensor> found;
  for (const auto& [kind, list] : lists) {
    const auto type = kind.second == kDouble ? kDouble : c10::ScalarType::Float;
    found.push_back(at::stack(at::_foreach_norm(list, p, type)).to(device, kDouble));
  }
  return at::cat(found);
}

/// The term of one rank, to be reduced over ranks: the sum of |x|^p, or max |x| for p = infinity;
/// 0-d.
at::Tensor local_term(const std::vector<at::Tensor>& tensors, double p, c10::Device device) {
  if (tensors.empty()) {
    return at::zeros({}, at::dtype(kDouble).device(device));
  }
  const at::Tensor each = norms(tensors, p, device);
  return std::isinf(p) ? each.max() : each.pow(p).sum();
}

/// Transfers under way are finished first: ranks would otherwise wait for one another.
void all_reduce(const DeviceMesh& mesh, const at::Tensor& values, ReduceOp op) {
  if (mesh.size() == 1) {
    return;
  }
  flush_pending_transfers(mesh.group_of_all_ranks()).all_reduce(values, op)->wait();
}

/// The maximum over all ranks. Back ends differ in whether a maximum keeps a NaN, so that it
/// travels beside the value.
at::Tensor reduce_max(const DeviceMesh& mesh, const at::Tensor& value) {
  const at::Tensor nan = value.isnan();
  const at::Tensor pair = at::stack({value.masked_fill(nan, 0.0), nan.to(kDouble)});
  all_reduce(mesh, pair, ReduceOp::kMax);
  return pair[0].masked_fill(pair[1].gt(0.0), std::nan(""));
}

/// A NaN or an infinity survives an addition by itself.
at::Tensor reduce_sum(const DeviceMesh& mesh, at::Tensor value) {
  all_reduce(mesh, value, ReduceOp::kSum);
  return value;
}

/// The device on which the joint mesh communicates; without a mesh, that of the parameters.
c10::Device home(const GradTerms& terms) {
  c10::Device first = terms.device.value_or(c10::kCPU);
  if (!terms.joint || terms.joint.size() == 1) {
    return first;
  }
  // With offload gradients are on the host and the mesh communicates on the GPU.
  const c10::Device device = terms.joint.device();
  return device.type() == first.type() ? first : device;
}

/// In three launches and the all-reduce between them.
kernels::NormAndFactor norm_on_cuda(const GradTerms& terms, c10::Device device,
                                    std::optional<double> max_norm) {
  const at::Tensor squares =
      kernels::squares_on_cuda(terms.owned, terms.plain, terms.copies, device);
  if (terms.joint) {
    all_reduce(terms.joint, squares[0], ReduceOp::kSum);
  }
  return kernels::clip_norm_on_cuda(squares, max_norm.value_or(1.0));
}

/// Composed of libtorch's operators.
at::Tensor composed_norm(const GradTerms& terms, double p, c10::Device device) {
  at::Tensor owned = local_term(terms.owned, p, device);
  // The same on every rank: added after the reduction, or it would count once a rank.
  const at::Tensor plain = local_term(terms.plain, p, device);
  const bool max = std::isinf(p);
  if (terms.joint) {
    // Copies should not differ, but a value that isn't finite on one rank alone must be seen by
    // all: they skip a step, or stop, together.
    const at::Tensor uncounted = plain + local_term(terms.copies, p, device);
    // A number less itself is 0 if it is finite. isfinite() has no meta kernel.
    const at::Tensor not_finite = uncounted.masked_fill((uncounted - uncounted).eq(0.0), 0.0);
    owned = max ? reduce_max(terms.joint, at::maximum(owned, not_finite))
                : reduce_sum(terms.joint, owned + not_finite);
  }
  return max ? at::maximum(owned, plain) : (owned + plain).pow(1.0 / p);
}

}  // namespace

kernels::NormAndFactor total_norm(const GradTerms& terms, double p,
                                  std::optional<double> max_norm) {
  const c10::Device device = home(terms);
  if (p == 2.0 && kernels::has_norm_kernels(terms.locals, device)) {
    return norm_on_cuda(terms, device, max_norm);
  }
  const at::Tensor norm = composed_norm(terms, p, device);
  // The 1e-6 is PyTorch's.
  return {norm, max_norm ? (*max_norm / (norm + 1e-6)).clamp_max(1.0) : at::Tensor(),
          norm.to(c10::ScalarType::Float)};
}

}  // namespace tessera::optim
