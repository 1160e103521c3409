#include "owned_blocks.h"

#include <cstdint>
#include <span>

#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::checkpoint {

std::vector<Box> owned_blocks(const at::Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const std::vector<std::int64_t> zeros(sizes.size(), 0);
  if (!tessera::is_distributed(tensor)) return {Box{zeros, zeros, sizes.vec()}};
  const auto& spec = sharding_spec(tensor);
  if (!spec.mesh.contains_this_rank()) return {};
  return owned_boxes(*spec.layout, std::span(sizes.data(), sizes.size()), spec.mesh.coordinate());
}

at::Tensor local_block(const at::Tensor& local, const Box& box) {
  at::Tensor block = local;
  for (std::size_t dim = 0; dim < box.sizes.size(); ++dim) {
    block = block.narrow(static_cast<std::int64_t>(dim), box.local_offset[dim], box.sizes[dim]);
  }
  return block;
}

}  // namespace tessera::checkpoint
