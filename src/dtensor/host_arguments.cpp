// Composite operators that read a tensor argument's memory on the host, as lengths or indices. A
// distributed one has no memory of its own to read: it is gathered first.

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <ATen/ops/ctc_loss_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/tensor_split_compositeimplicitautograd_dispatch.h>

#include <algorithm>
#include <initializer_list>
#include <optional>

#include "override_composite.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/policy.h"

namespace tessera::detail {
namespace {

at::Tensor on_host(const at::Tensor& tensor) {
  return tessera::is_distributed(tensor) ? DistributedTensor(tensor).full_tensor() : tensor;
}

bool all_distributed(std::initializer_list<at::Tensor> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), tessera::is_distributed);
}

std::vector<at::Tensor> tensor_split(const at::Tensor& self, const at::Tensor& where,
                                     std::int64_t dim) {
  return at::compositeimplicitautograd::tensor_split(self, on_host(where), dim);
}

at::Tensor ctc_loss(const at::Tensor& log_probs, const at::Tensor& targets,
                    const at::Tensor& input_lengths, const at::Tensor& target_lengths,
                    std::int64_t blank, std::int64_t reduction, bool zero_infinity) {
  // The loss is divided by the gathered lengths.
  std::optional<ReplicationScope> scope;
  if (all_distributed({log_probs, targets, input_lengths, target_lengths})) scope.emplace();
  return at::compositeimplicitautograd::ctc_loss(log_probs, targets, on_host(input_lengths),
                                                 on_host(target_lengths), blank, reduction,
                                                 zero_infinity);
}

void implement_host_arguments(torch::Library& library) {
  library.impl("tensor_split.tensor_indices_or_sections", &tensor_split);
  library.impl("ctc_loss.Tensor", &ctc_loss);
}

TESSERA_OVERRIDE_COMPOSITE(implement_host_arguments)

}  // namespace
}  // namespace tessera::detail
