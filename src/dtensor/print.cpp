#include <ATen/core/Formatting.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ostream>
#include <sstream>

#include "below_autograd.h"
#include "distributed_impl.h"
#include "tessera/core/layout_math.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera {
namespace {

constexpr std::int64_t kMostElements = 1000;

/// Where this rank's part lies in the whole: "rows 2:4, ..."; blocks where it is several.
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

std::string values(const at::Tensor& local) {
  if (local.is_meta()) return "(no values on the meta device)";
  if (local.numel() > kMostElements) return fmt::format("({} elements)", local.numel());
  const detail::BelowAutograd guard;
  std::ostringstream text;
  text << local;
  return text.str();
}

}  // namespace

std::string to_string(const DistributedTensor& tensor) {
  const auto& value = tensor.tensor();
  if (!value.defined()) return "DistributedTensor()";
  const auto& mesh = tensor.mesh();
  return fmt::format("DistributedTensor([{}], {}, {}, {}), rank {} holds {}:\n{}",
                     fmt::join(value.sizes(), ", "), c10::toString(value.scalar_type()),
                     to_string(mesh), to_string(tensor.placements()), mesh.world()->rank(),
                     places(tensor), values(local_tensor(value)));
}

std::ostream& operator<<(std::ostream& stream, const DistributedTensor& tensor) {
  return stream << to_string(tensor);
}

}  // namespace tessera
