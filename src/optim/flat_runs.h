#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::optim {

/// Whether contiguous `next` begins in memory where contiguous `first` ends.
bool adjoins(const at::Tensor& first, const at::Tensor& next);

/// `numel` elements from where `first` begins, of its storage, below autograd: (numel).
at::Tensor flat_view(const at::Tensor& first, std::int64_t numel);

/// The same elements in fewer tensors: neighbours in the list that are neighbours in memory, as
/// FSDP lays out the shards of a unit, become one. Types and devices may be mixed.
std::vector<at::Tensor> merge_adjoining(const std::vector<at::Tensor>& tensors);

}  // namespace tessera::optim
