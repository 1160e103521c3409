// The check at the end of linalg.inv, solve, cholesky and others. libtorch's own reads the error
// codes on the host and throws for the first matrix that failed. Here all ranks throw, or none.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <ATen/ops/_linalg_check_errors.h>

#include "agreement/agreement.h"
#include "rank/below_autograd.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/lent_keys.h"

namespace tessera::detail {
namespace {

void check(const at::Tensor& codes, c10::string_view name, bool is_matrix) {
  const BelowAutograd guard;
  at::_linalg_check_errors(codes, name, is_matrix);
}

bool any_code(const at::Tensor& codes) {
  const BelowAutograd guard;
  return codes.any().item<bool>();
}

/// Where the batch of matrices is sharded, one number is all-reduced: whether any failed. Only then
/// are the codes gathered, so that every rank throws the same error.
void check_codes(const at::Tensor& codes, c10::string_view name, bool is_matrix) {
  // Replicated codes are equal on all ranks, and so is what they throw.
  if (!tessera::is_distributed(codes) || sharding_spec(codes).layout->is_replicated()) {
    return check(local_tensor(codes), name, is_matrix);
  }
  // A meta tensor has no codes.
  if (codes.is_meta() || !any_rank(sharding_spec(codes).mesh, any_code(local_tensor(codes)))) {
    return;
  }
  check(DistributedTensor(codes).full_tensor(), name, is_matrix);
}

TORCH_LIBRARY_IMPL(aten, TESSERA_DISTRIBUTED_KEY, library) {
  library.impl("_linalg_check_errors", &check_codes);
}

}  // namespace
}  // namespace tessera::detail
