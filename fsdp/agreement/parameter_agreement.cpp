// A debug check, at a unit's first gather, that all ranks have built the same model. Shards are
// padded to one size, so that collectives of different parameters may succeed and give each rank
// the values of another parameter; nothing else would notice.

#include "agreement/parameter_agreement.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "tessera/comm/agreement.h"
#include "tessera/core/detail/environment_switch.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/flush_pending_transfers.h"
#include "tessera/dtensor/random.h"

namespace tessera::fsdp {
namespace {

using Numbers = std::vector<std::int64_t>;

/// Sent instead of the text, whose length differs; the ranks print only their own.
std::int64_t hash_of(const std::string& text) {
  return std::bit_cast<std::int64_t>(stream_of(text.c_str()));
}

/// The parameters of some groups, one line each.
std::vector<std::string> lines_of(const std::vector<const ParameterGroup*>& groups) {
  std::vector<std::string> lines;
  for (const ParameterGroup* group : groups) {
    for (const ShardedParameter& parameter : group->parameters()) {
      lines.push_back(fmt::format("'{}' of sizes [{}], {}", parameter.name(),
                                  fmt::join(parameter.sharded().sizes(), ", "),
                                  c10::toString(parameter.dtype())));
    }
  }
  return lines;
}

/// What is wrong on `mesh`, empty if nothing; the same on all ranks but for what they have
/// themselves. `earlier`: what was found on the meshes before. Collective.
std::string compare(const DeviceMesh& mesh, c10::Device device,
                    const std::vector<std::string>& lines, const std::string& earlier) {
  Numbers hashes;
  std::ranges::transform(lines, std::back_inserter(hashes), hash_of);
  const auto differs_from_first = [](const std::vector<Numbers>& all, std::size_t i) {
    const auto found = std::ranges::find_if(
        all, [&](const Numbers& numbers) { return numbers[i] != all.front()[i]; });
    return static_cast<std::size_t>(found - all.begin());
  };
  const auto name = [&](std::size_t rank) { return mesh.ranks()[rank]; };

  // Counts first: gather_values needs as many numbers from every rank.
  comm::Communicator& group = flush_pending_transfers(mesh.group_of_all_ranks());
  const std::vector<Numbers> counts = comm::gather_values(
      group, device, {static_cast<std::int64_t>(lines.size()), earlier.empty() ? 0 : 1});
  if (const std::size_t other = differs_from_first(counts, 0); other < counts.size()) {
    return fmt::format("rank {} has {} parameters, rank {} has {}", name(0), counts[0][0],
                       name(other), counts[other][0]);
  }
  const auto mismatched =
      std::ranges::find_if(counts, [](const Numbers& own) { return own[1] != 0; });
  // Goes around with the counts, so that ranks of a larger mesh learn what a smaller one found and
  // all of them throw.
  if (!earlier.empty()) {
    return earlier;
  }
  if (mismatched != counts.end()) {
    return fmt::format("rank {} has others than a rank that it shares them with",
                       name(static_cast<std::size_t>(mismatched - counts.begin())));
  }
  if (lines.empty()) {
    return "";
  }
  const std::vector<Numbers> all = comm::gather_values(group, device, hashes);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (const std::size_t other = differs_from_first(all, i); other < all.size()) {
      return fmt::format("parameter {} differs between rank {} and rank {}; on rank {} it is {}", i,
                         name(0), name(other), mesh.world()->rank(), lines[i]);
    }
  }
  return "";
}

}  // namespace

void check_same_parameters(std::vector<ParameterGroup>& groups, const DataMesh& mesh,
                           const std::string& label) {
  if (!tessera::detail::debug_checks()) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  // Small meshes first, the unit's last: it stops ranks that would continue with the next unit.
  std::vector<std::pair<DeviceMesh, std::vector<const ParameterGroup*>>> meshes;
  for (const ParameterGroup& group : groups) {
    const DeviceMesh& own = group.mesh().all;
    auto known = std::ranges::find(meshes, own, [](const auto& entry) { return entry.first; });
    if (known == meshes.end()) {
      known = meshes.insert(meshes.end(), {own, {}});
    }
    known->second.push_back(&group);
  }
  if (std::ranges::find(meshes, mesh.all, [](const auto& entry) { return entry.first; }) ==
      meshes.end()) {
    meshes.push_back({mesh.all, {}});
  }
  std::ranges::stable_sort(meshes, {}, [&](const auto& entry) {
    return std::pair(entry.first == mesh.all, entry.first.size());
  });
  std::string difference;
  for (const auto& [own, members] : meshes) {
    difference = compare(own, mesh.device(), lines_of(members), difference);
  }
  TESSERA_CHECK(difference.empty(), label, ": ranks have other parameters: ", difference,
                "; make the same model on every rank");
}

}  // namespace tessera::fsdp
