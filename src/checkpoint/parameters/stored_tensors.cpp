// Converts between a fused parameter and the separate tensors that other programs use. Only rows
// are concerned: every block of a parameter, however it is sharded, is cut into ranges of its first
// dimension, so that reading and writing need no more memory than without parts.

#include "parameters/stored_tensors.h"

#include <algorithm>

namespace tessera::checkpoint {
namespace {

/// "layers.0.q.weight" of "layers.0.qkv.weight" and "q".
std::string name_beside(const std::string& fqn, const std::string& module) {
  const std::size_t leaf = fqn.rfind('.');
  const std::size_t parent =
      leaf == std::string::npos || leaf == 0 ? std::string::npos : fqn.rfind('.', leaf - 1);
  const std::string above = parent == std::string::npos ? "" : fqn.substr(0, parent + 1);
  return above + module + "." + fqn.substr(leaf == std::string::npos ? 0 : leaf + 1);
}

}  // namespace

void StoredTensor::visit_rows(std::int64_t first_row, std::int64_t rows,
                              const VisitRows& visit) const {
  for (std::int64_t group = 0; group < groups; ++group) {
    const std::int64_t begin = first + group * group_rows;
    const std::int64_t from = std::max(begin, first_row);
    const std::int64_t to = std::min(begin + run, first_row + rows);
    if (from < to) {
      visit(group * run + from - begin, from - first_row, to - from);
    }
  }
}

void StoredTensor::visit(std::span<const std::int64_t> offset, const at::Tensor& block,
                         const Visit& visit) const {
  if (is_whole()) {
    return visit(offset, block);
  }
  std::vector<std::int64_t> at(offset.begin(), offset.end());
  visit_rows(offset[0], block.size(0), [&](std::int64_t row, std::int64_t from, std::int64_t rows) {
    at[0] = row;
    visit(at, block.narrow(0, from, rows));
  });
}

std::vector<StoredTensor> stored_tensors(const std::string& fqn, const nn::ParameterSlot& slot) {
  const std::vector<std::int64_t> sizes = slot.persistent().sizes().vec();
  if (!slot.stored_parts()) {
    return {{.name = fqn, .sizes = sizes}};
  }
  const nn::StoredParts& stored = *slot.stored_parts();
  std::vector<StoredTensor> tensors;
  std::int64_t first = 0;
  for (const nn::StoredParts::Part& part : stored.parts) {
    StoredTensor& tensor = tensors.emplace_back(
        StoredTensor{.name = name_beside(fqn, part.module), .sizes = sizes, .first = first});
    tensor.run = part.rows;
    tensor.group_rows = sizes[0] / stored.groups;
    tensor.groups = stored.groups;
    tensor.sizes[0] = part.rows * stored.groups;
    first += part.rows;
  }
  return tensors;
}

}  // namespace tessera::checkpoint
