// Several Linears in one weight. Only the order of its rows is new: it locates a part's columns in
// a result, and its rows in files.

#include "tessera/nn/fused_linear.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::nn {
namespace {

std::int64_t total_features(const std::vector<FusedPart>& parts, std::int64_t groups) {
  std::int64_t total = 0;
  for (const FusedPart& part : parts) {
    TESSERA_CHECK(groups > 0 && part.out_features > 0 && part.out_features % groups == 0,
                  "FusedLinear: part '", part.name, "' of ", part.out_features, " features has no ",
                  groups, " equal groups; pass a number of groups that divides every part");
    total += part.out_features;
  }
  TESSERA_CHECK(total > 0, "FusedLinear without parts; name at least one");
  return total;
}

}  // namespace

FusedLinear::FusedLinear(std::int64_t in_features, std::vector<FusedPart> parts,
                         FusedLinearOptions options)
    : Linear(in_features, total_features(parts, options.groups), {.bias = options.bias}),
      parts_(std::move(parts)),
      groups_(options.groups) {
  StoredParts stored{.parts = {}, .groups = groups_};
  for (const FusedPart& part : parts_) {
    stored.parts.push_back({part.name, part.out_features / groups_});
  }
  for (const auto& [name, slot] : slots()) {
    slot->set_stored_parts(stored);
  }
}

std::vector<at::Tensor> FusedLinear::split(const at::Tensor& output) const {
  const std::int64_t features = output.size(-1);
  const std::int64_t of_group = out_features() / groups_;
  // A local tensor of a group cut by ranks, or of unequal parts, does not show whose columns it
  // has.
  const auto is_equal = [this](const FusedPart& part) {
    return part.out_features == parts_.front().out_features;
  };
  const bool whole = features == out_features();
  const bool equal = std::ranges::all_of(parts_, is_equal);
  const auto count = static_cast<std::int64_t>(parts_.size());
  TESSERA_CHECK(whole || (groups_ > 1 ? features % of_group == 0 : equal && features % count == 0),
                "FusedLinear: the parts of ", features, " of ", out_features(),
                " features are not known; pass what forward returned, or a rank's share of it "
                "under fused_colwise_parallel");
  if (groups_ == 1 && equal) {
    return output.split(features / count, -1);
  }
  std::vector<std::int64_t> sizes;
  for (const FusedPart& part : parts_) {
    sizes.push_back(part.out_features / groups_);
  }
  if (groups_ == 1) {
    return output.split_with_sizes(sizes, -1);
  }
  std::vector<at::Tensor> parts =
      output.unflatten(-1, {features / of_group, of_group}).split_with_sizes(sizes, -1);
  for (at::Tensor& part : parts) {
    part = part.flatten(-2);
  }
  return parts;
}

}  // namespace tessera::nn
