#include <range/v3/view/enumerate.hpp>

#include <algorithm>

#include "lowerings/lowering.h"
#include "tessera/core/detail/layout_math.h"

namespace tessera::detail {

// The table of lowerings (alternative implementations of operators). Files of this folder, and some
// files of src/dtensor/fused, define the lowerings.

namespace {

constexpr std::string_view kAtenPrefix = "aten::";

/// All lowerings by operator name. Adding a lowering does not move other lowerings in memory.
Lowerings& lowerings() {
  static Lowerings by_name;
  return by_name;
}

}  // namespace

AddedLowerings::AddedLowerings(std::initializer_list<Lowering> added) {
  for (const Lowering& lowering : added) {
    lowerings().emplace(lowering.name, lowering);
  }
}

const Lowerings& all_lowerings() {
  return lowerings();
}

const Lowering* lowering_of(const OperatorInfo& info) {
  std::string_view name = info.name;
  if (name.starts_with(kAtenPrefix)) {
    name.remove_prefix(kAtenPrefix.size());
  }
  const auto found = lowerings().find(name);
  return found == lowerings().end() ? nullptr : &found->second;
}

// Helper functions for lowerings (alternative implementations of operators). Byte counts are maxima
// over all ranks, so that all ranks choose the same lowering.

const DistributedTensorImpl* non_partial_argument(const BoundCall& call, std::size_t arg) {
  if (!call.call.has_tensor(arg)) {
    return nullptr;
  }
  const auto index = static_cast<std::size_t>(call.call.tensor_index(arg));
  const auto* impl = as_distributed(call.tensors[index]);
  // Lowerings do not support a Partial tensor: its elements are unknown before the reduction. For a
  // Partial tensor, the operator's sharding rule is used.
  return impl != nullptr && !impl->spec()->sharding.layout->is_partial() ? impl : nullptr;
}

std::vector<int> sharding_mesh_dims(LayoutPtr layout, const Dims& dims) {
  std::vector<int> result;
  for (const auto dim : dims) {
    const auto own = layout->mesh_dims_of(static_cast<int>(dim));
    result.insert(result.end(), own.begin(), own.end());
  }
  return result;
}

std::int64_t most_local_results(const TensorSpec& spec, const Dims& dims) {
  const auto layout = spec.sharding.layout;
  const std::vector<std::int64_t> first(layout->mesh_sizes().size(), 0);
  const auto sizes = local_sizes(*layout, spec.sizes, first);
  std::int64_t count = 1;
  for (const auto& [dim, size] : ranges::views::enumerate(sizes)) {
    if (std::ranges::find(dims, static_cast<std::int64_t>(dim)) == dims.end()) {
      count *= size;
    }
  }
  return count;
}

double all_reduce_bytes(const TensorSpec& spec, const Dims& dims, double elements) {
  const auto layout = spec.sharding.layout;
  double ranks = 1;
  for (const int m : sharding_mesh_dims(layout, dims)) {
    ranks *= static_cast<double>(layout->mesh_sizes()[static_cast<std::size_t>(m)]);
  }
  // An all-reduce sends as many bytes as a reduce-scatter and an all-gather.
  return 2 * elements * static_cast<double>(c10::elementSize(spec.dtype)) * (ranks - 1) / ranks;
}

}  // namespace tessera::detail
