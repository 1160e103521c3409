// A table of the ranks that hold each block, as torch.distributed.tensor.debug.visualize_sharding
// prints it. Computed from the layout alone, without communication.

#include "tessera/dtensor/visualize.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "tensor/tensor_spec.h"
#include "tessera/core/error.h"
#include "tessera/core/layout_math.h"

namespace tessera {
namespace {

using Range = std::pair<std::int64_t, std::int64_t>;  ///< [begin, end)

/// The range of a block along `dim`. A vector is shown as a table of one column, so a dimension
/// that is missing has one position.
Range range_of(const Box& box, std::size_t dim) {
  if (dim >= box.sizes.size()) {
    return {0, 1};
  }
  return {box.global_offset[dim], box.global_offset[dim] + box.sizes[dim]};
}

std::string label(const Range& range) {
  return fmt::format("{}:{}", range.first, range.second);
}

/// The ranks that hold each block.
std::map<std::pair<Range, Range>, std::vector<int>> holders(const DistributedTensor& tensor) {
  const auto& mesh = tensor.mesh();
  std::map<std::pair<Range, Range>, std::vector<int>> blocks;
  for (std::int64_t index = 0; index < mesh.size(); ++index) {
    const auto coordinate = mesh.shape().coordinate(index);
    for (const auto& box : owned_boxes(*tensor.layout(), tensor.tensor().sizes(), coordinate)) {
      blocks[{range_of(box, 0), range_of(box, 1)}].push_back(
          mesh.ranks()[static_cast<std::size_t>(index)]);
    }
  }
  return blocks;
}

}  // namespace

std::string visualize(const DistributedTensor& tensor) {
  const auto sizes = tensor.tensor().sizes();
  TESSERA_CHECK(sizes.size() == 1 || sizes.size() == 2,
                "visualize shows tensors of 1 or 2 "
                "dimensions, found ",
                sizes.size(), ": take a slice of it first");
  const auto blocks = holders(tensor);
  std::set<Range> rows, columns;
  for (const auto& [block, ranks] : blocks) {
    rows.insert(block.first);
    columns.insert(block.second);
  }
  // The width of a column, in characters: room for ranges of five digits.
  constexpr int kWidth = 12;
  auto text =
      fmt::format("[{}] on {}: {}\n{:{}}", fmt::join(sizes, ", "), to_string(tensor.mesh().shape()),
                  detail::describe(*tensor.layout(), sizes), "", kWidth);
  for (const auto& column : columns) {
    text += fmt::format("{:{}}", sizes.size() == 1 ? "" : label(column), kWidth);
  }
  for (const auto& row : rows) {
    text += fmt::format("\n{:{}}", label(row), kWidth);
    for (const auto& column : columns) {
      // Blocks need not form a full grid: a cell without one is empty.
      const auto block = blocks.find({row, column});
      const auto ranks = block == blocks.end() ? std::vector<int>{} : block->second;
      text += fmt::format("{:{}}", fmt::format("{}", fmt::join(ranks, ",")), kWidth);
    }
  }
  return text + "\n";
}

}  // namespace tessera
