// The origin of parts of a parameter (what they were cut from or filled by), and its comparison.

#include "tessera/nn/detail/origins.h"

#include <algorithm>
#include <iterator>
#include <memory>

#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

std::int64_t detail::origin_of_seed(std::uint64_t seed) {
  return static_cast<std::int64_t>(substream(seed, 1) | 1);
}

std::int64_t detail::origin_of_values(at::Tensor whole) {
  constexpr std::int64_t kPositions = 16;
  for (std::int64_t dim = 0; dim < whole.dim(); ++dim) {
    const std::int64_t step = std::max<std::int64_t>(whole.size(dim) / kPositions, 1);
    whole = whole.slice(dim, 0, std::nullopt, step);
  }
  const std::int64_t hash = tessera::detail::hash_of_values(whole);
  return hash != 0 ? hash : 1;
}

void detail::note_origin(const ParameterSlot& slot, std::int64_t number) {
  const at::Tensor& tensor = slot.persistent();
  for (const ParameterSlot::Owner& owner : slot.owners()) {
    auto origins = owner.module->attached<Origins>();
    if (origins == nullptr) {
      origins = std::make_shared<Origins>();
      owner.module->attach(origins);
    }
    origins->of[&slot] = {number, tessera::detail::identity_of(tensor), written_version(tensor)};
  }
}

std::int64_t detail::origin_of(const ParameterSlot& slot) {
  const at::Tensor& tensor = slot.persistent();
  if (slot.owners().empty() || local_tensor(tensor).numel() == 0) {
    return 0;
  }
  const auto origins = slot.owners().front().module->attached<Origins>();
  if (origins == nullptr) {
    return 0;
  }
  const auto found = origins->of.find(&slot);
  const bool valid = found != origins->of.end() &&
                     found->second.tensor == tessera::detail::identity_of(tensor) &&
                     found->second.version == written_version(tensor);
  return valid ? found->second.number : 0;
}

namespace {

using NamedOrigins = std::vector<std::pair<std::string, std::int64_t>>;

/// For messages: which part of the model this rank gave.
std::string range_of(const NamedOrigins& origins) {
  return origins.empty() ? ""
                         : tessera::detail::concat(" (on this rank from ", origins.front().first,
                                                   " to ", origins.back().first, ")");
}

/// Throws Error, on all ranks, if some have more or fewer: they could not exchange them.
void check_equally_many(const DeviceMesh& mesh, const NamedOrigins& origins) {
  const auto counts = comm::gather_on_hosts(mesh.group_of_all_ranks(), {std::ssize(origins)});
  for (std::size_t rank = 1; rank < counts.size(); ++rank) {
    TESSERA_CHECK(counts[rank] == counts[0], "the models of the ranks differ: of ", to_string(mesh),
                  ", rank ", mesh.ranks()[rank], " has ", counts[rank][0],
                  " parameters where rank ", mesh.ranks()[0], " has ", counts[0][0],
                  range_of(origins), "; make the same model on every rank");
  }
}

}  // namespace

std::string detail::different_origins(const DeviceMesh& mesh, const NamedOrigins& origins) {
  check_equally_many(mesh, origins);
  if (origins.empty()) {
    return "";
  }
  std::vector<std::int64_t> own;
  std::ranges::transform(origins, std::back_inserter(own),
                         [](const auto& each) { return each.second; });
  const auto all = comm::gather_on_hosts(mesh.group_of_all_ranks(), own);
  for (std::size_t i = 0; i < origins.size(); ++i) {
    std::size_t first = all.size();
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank][i] == 0) {
        continue;
      }
      first = std::min(first, rank);
      if (all[rank][i] != all[first][i]) {
        return tessera::detail::concat("the shards of ", origins[i].first, " on rank ",
                                       mesh.ranks()[first], " and rank ", mesh.ranks()[rank],
                                       " are parts of different tensors");
      }
    }
  }
  return "";
}

}  // namespace tessera::nn
