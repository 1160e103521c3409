#include <ATen/core/Formatting.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <ostream>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "rank/rank.h"
#include "tensor/tensor_spec.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera {

// Prints distributed tensors. libtorch's printer reads memory, and a wrapper has no memory, so the
// handle has a separate printer. It shows this rank's values and their place in the whole tensor.

namespace {

constexpr std::int64_t kMostElements = 1000;

/// This rank's ranges of the global tensor, as text: "[2:4, 0:3]", or several such blocks.
std::string places(const DistributedTensor& tensor) {
  std::vector<std::string> blocks;
  const auto sizes = tensor.tensor().sizes();
  for (const auto& box : owned_boxes(*tensor.layout(), sizes, tensor.mesh().coordinate())) {
    std::vector<std::string> ranges;
    for (std::size_t dim = 0; dim < box.sizes.size(); ++dim) {
      const auto begin = box.global_offset[dim];
      ranges.push_back(fmt::format("{}:{}", begin, begin + box.sizes[dim]));
    }
    blocks.push_back(fmt::format("[{}]", fmt::join(ranges, ", ")));
  }
  return blocks.empty() ? "nothing" : fmt::format("{}", fmt::join(blocks, " and "));
}

/// The values of a local tensor as text, by libtorch's printer. Below autograd, because the printer
/// calls operators.
std::string values(const at::Tensor& local) {
  if (local.is_meta()) {
    return "(no values on the meta device)";
  }
  if (local.numel() > kMostElements) {
    return fmt::format("({} elements)", local.numel());
  }
  const detail::BelowAutograd guard;
  std::ostringstream text;
  text << local;
  return text.str();
}

std::string text_of(const DistributedTensor& tensor, const DistributedTensor& shown,
                    const char* holds) {
  const auto& value = tensor.tensor();
  const auto& mesh = tensor.mesh();
  return fmt::format("DistributedTensor([{}], {}, {}, {}), rank {} {} {}:\n{}",
                     fmt::join(value.sizes(), ", "), c10::toString(value.scalar_type()),
                     to_string(mesh), detail::describe(*tensor.layout(), value.sizes()),
                     mesh.world()->rank(), holds, places(shown), values(local_tensor(shown)));
}

}  // namespace

std::string local_to_string(const DistributedTensor& tensor) {
  if (!tensor.tensor().defined()) {
    return "DistributedTensor()";
  }
  return text_of(tensor, tensor, "holds");
}

std::string to_string(const DistributedTensor& tensor) {
  if (!tensor.tensor().defined() || !tensor.layout()->is_partial()) {
    return local_to_string(tensor);
  }
  // A pending reduction is reduced before printing, because its terms are not values of the tensor.
  const at::NoGradGuard no_grad;
  const auto reduced = tensor.redistribute(detail::gradient_layout(tensor.layout()));
  return text_of(tensor, reduced, "holds, reduced,");
}

std::ostream& operator<<(std::ostream& stream, const DistributedTensor& tensor) {
  return stream << to_string(tensor);
}

// A table of the ranks that have each block, from the layout alone, in the format of
// torch.distributed.tensor.debug.visualize_sharding.

namespace {

/// A range of indices [begin, end), without `end`.
using Range = std::pair<std::int64_t, std::int64_t>;

/// A range along a dimension of the block. A vector is shown as a table with one column, so a
/// missing dimension has the range of one position.
Range range_of(const Box& box, std::size_t dim) {
  if (dim >= box.sizes.size()) {
    return {0, 1};
  }
  return {box.global_offset[dim], box.global_offset[dim] + box.sizes[dim]};
}

std::string label(const Range& range) {
  return fmt::format("{}:{}", range.first, range.second);
}

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
      // The blocks need not fill the table: a cell without a block is empty.
      const auto block = blocks.find({row, column});
      const auto ranks = block == blocks.end() ? std::vector<int>{} : block->second;
      text += fmt::format("{:{}}", fmt::format("{}", fmt::join(ranks, ",")), kWidth);
    }
  }
  return text + "\n";
}

}  // namespace tessera
