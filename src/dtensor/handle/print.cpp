// How a distributed tensor is printed. libtorch's printer reads memory, which a wrapper lacks, so
// the handle has a separate printer, which shows what this rank holds and where that is in the
// whole.

#include <ATen/core/Formatting.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ostream>
#include <sstream>

#include "rank/below_autograd.h"
#include "tensor/tensor_spec.h"
#include "tessera/core/layout_math.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera {
namespace {

// For a local tensor: more are counted instead of shown, to keep a log readable.
constexpr std::int64_t kMostElements = 1000;

/// Which ranges of the global tensor this rank holds: "[2:4, 0:3]", or several blocks.
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

/// The values of a local tensor, by libtorch's printer. Below autograd: it calls operators.
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

/// The spec of `tensor`, and the local values of `shown`.
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
  // The terms of a pending reduction are not values of the tensor: they are reduced first.
  const at::NoGradGuard no_grad;
  const auto reduced = tensor.redistribute(detail::gradient_layout(tensor.layout()));
  return text_of(tensor, reduced, "holds, reduced,");
}

std::ostream& operator<<(std::ostream& stream, const DistributedTensor& tensor) {
  return stream << to_string(tensor);
}

}  // namespace tessera
