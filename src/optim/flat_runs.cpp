#include "flat_runs.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/as_strided.h>

namespace tessera::optim {

bool adjoins(const at::Tensor& first, const at::Tensor& next) {
  return first.storage().is_alias_of(next.storage()) && first.scalar_type() == next.scalar_type() &&
         first.is_contiguous() && next.is_contiguous() &&
         next.storage_offset() == first.storage_offset() + first.numel();
}

at::Tensor flat_view(const at::Tensor& first, std::int64_t numel) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::as_strided(first, {numel}, {1}, first.storage_offset());
}

std::vector<at::Tensor> merge_adjoining(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> runs;
  for (std::size_t i = 0; i < tensors.size();) {
    std::int64_t numel = tensors[i].numel();
    std::size_t end = i + 1;
    for (; end < tensors.size() && adjoins(tensors[end - 1], tensors[end]); ++end) {
      numel += tensors[end].numel();
    }
    runs.push_back(end == i + 1 ? tensors[i] : flat_view(tensors[i], numel));
    i = end;
  }
  return runs;
}

}  // namespace tessera::optim
