#include "parameter_agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <numeric>
#include <string_view>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/dtensor/in_order.h"
#include "tessera/dtensor/random.h"

namespace tessera::fsdp {
namespace {

using Numbers = std::vector<std::int64_t>;

bool debugging() {
  const char* value = std::getenv("TESSERA_DEBUG");
  return value != nullptr && std::string_view(value) == "1";
}

comm::Communicator& group_of(const DeviceMesh& mesh) {
  std::vector<int> all(static_cast<std::size_t>(mesh.ndim()));
  std::iota(all.begin(), all.end(), 0);
  return in_order(mesh.group(all));
}

std::int64_t hash_of(const std::string& text) {
  return std::bit_cast<std::int64_t>(stream_of(text.c_str()));
}

/// The numbers of all ranks, which must be equally many. Collective.
std::vector<Numbers> gather(const DeviceMesh& mesh, c10::Device device, Numbers own) {
  const auto count = static_cast<std::int64_t>(own.size());
  const at::Tensor input = at::from_blob(own.data(), {count}, at::kLong).to(device).clone();
  const at::Tensor output = at::empty({mesh.size(), count}, input.options());
  group_of(mesh).all_gather(output, input)->wait();
  const at::Tensor found = output.cpu();
  const auto* first = found.const_data_ptr<std::int64_t>();
  std::vector<Numbers> all;
  for (std::int64_t rank = 0; rank < mesh.size(); ++rank, first += count) {
    all.emplace_back(first, first + count);
  }
  return all;
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
/// themselves. `trouble`: what was found elsewhere. Collective.
std::string compare(const DeviceMesh& mesh, c10::Device device,
                    const std::vector<std::string>& lines, const std::string& trouble) {
  Numbers hashes;
  std::ranges::transform(lines, std::back_inserter(hashes), hash_of);
  const auto differs_from_first = [](const std::vector<Numbers>& all, std::size_t i) {
    const auto found = std::ranges::find_if(
        all, [&](const Numbers& numbers) { return numbers[i] != all.front()[i]; });
    return static_cast<std::size_t>(found - all.begin());
  };
  const auto name = [&](std::size_t rank) { return mesh.ranks()[rank]; };

  const std::vector<Numbers> counts =
      gather(mesh, device, {static_cast<std::int64_t>(lines.size()), trouble.empty() ? 0 : 1});
  if (const std::size_t other = differs_from_first(counts, 0); other < counts.size()) {
    return fmt::format("rank {} has {} parameters, rank {} has {}", name(0), counts[0][0],
                       name(other), counts[other][0]);
  }
  const auto told = std::ranges::find_if(counts, [](const Numbers& own) { return own[1] != 0; });
  if (!trouble.empty() || told != counts.end()) {
    return !trouble.empty() ? trouble
                            : fmt::format("rank {} has others than a rank that it shares them with",
                                          name(static_cast<std::size_t>(told - counts.begin())));
  }
  if (lines.empty()) {
    return "";
  }
  const std::vector<Numbers> all = gather(mesh, device, hashes);
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
  if (!debugging()) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  // Small meshes first, the unit's last: it holds whoever would go on to the next unit.
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
  std::string trouble;
  for (const auto& [own, members] : meshes) {
    trouble = compare(own, mesh.device(), lines_of(members), trouble);
  }
  TESSERA_CHECK(trouble.empty(), label, ": ranks have other parameters: ", trouble,
                "; make the same model on every rank");
}

}  // namespace tessera::fsdp
