// Converts between a fused parameter and the separate tensors that other programs use. Only rows
// are concerned: every block of a parameter, however it is sharded, is cut into ranges of its first
// dimension, so that reading and writing need no more memory than without parts.

#include "parameters/stored_tensors.h"

namespace tessera::checkpoint {

void StoredTensor::visit(std::span<const std::int64_t> offset, const at::Tensor& block,
                         const Visit& visit) const {
  if (!rows) {
    return visit(offset, block);
  }
  std::vector<std::int64_t> at(offset.begin(), offset.end());
  rows->visit(offset[0], block.size(0),
              [&](std::int64_t row, std::int64_t from, std::int64_t count) {
                at[0] = row;
                visit(at, block.narrow(0, from, count));
              });
}

std::vector<StoredTensor> stored_tensors(const std::string& fqn, const nn::ParameterSlot& slot) {
  const std::vector<std::int64_t> sizes = slot.persistent().sizes().vec();
  if (!slot.stored_parts()) {
    return {{.name = fqn, .sizes = sizes}};
  }
  std::vector<StoredTensor> tensors;
  for (const nn::NamedRows& part : nn::rows_of_parts(fqn, *slot.stored_parts())) {
    tensors.push_back({.name = part.name, .sizes = sizes, .rows = part.rows});
    tensors.back().sizes[0] = part.rows.run * part.rows.groups;
  }
  return tensors;
}

}  // namespace tessera::checkpoint
