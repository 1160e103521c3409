#include "verify/findings.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <map>
#include <utility>

#include "tessera/comm/agreement.h"
#include "tessera/dtensor/detail/flush_pending_transfers.h"

namespace tessera::observe {
namespace {

/// Rounding of one rank moves a tensor by its noise, that of a mesh, which sums in another order,
/// in other ways: a few times as far at most.
constexpr double kNoises = 8;
/// Besides, of the largest value: sums that no weight changes.
constexpr double kRoundings = 8;

/// JSON has no infinity.
std::uint64_t bits(double number) {
  return std::bit_cast<std::uint64_t>(number);
}

nlohmann::json to_json(const Finding& f) {
  return {f.name,           f.fqn,           f.layout,        f.at,         f.value, f.recorded,
          bits(f.distance), bits(f.largest), bits(f.epsilon), bits(f.noise)};
}

Finding from_json(const nlohmann::json& json) {
  const auto number = [&](std::size_t i) {
    return std::bit_cast<double>(json[i].get<std::uint64_t>());
  };
  return {json[0], json[1],   json[2],   json[3],   json[4],
          json[5], number(6), number(7), number(8), number(9)};
}

/// One tensor, as the ranks have found it.
struct OfRanks {
  std::vector<std::pair<int, Finding>> findings;  ///< with the world rank

  /// The largest of any rank.
  double largest(double Finding::*of) const {
    double most = 0;
    for (const auto& [rank, finding] : findings) {
      most = std::max(most, finding.*of);
    }
    return most;
  }
};

/// In the order of rank 0; what others have besides comes last.
std::vector<OfRanks> gather(const std::vector<Finding>& own, const DeviceMesh& mesh) {
  nlohmann::json text = nlohmann::json::array();
  for (const Finding& finding : own) {
    text.push_back(to_json(finding));
  }
  comm::Communicator& group = flush_pending_transfers(mesh.group_of_all_ranks());
  const auto texts = comm::gather_texts(group, mesh.device(), text.dump());
  std::vector<OfRanks> all;
  std::map<std::string, std::size_t> index;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    for (const nlohmann::json& item : nlohmann::json::parse(texts[rank])) {
      Finding finding = from_json(item);
      const auto [place, is_new] = index.emplace(finding.name, all.size());
      if (is_new) {
        all.emplace_back();
      }
      all[place->second].findings.emplace_back(mesh.ranks()[rank], std::move(finding));
    }
  }
  return all;
}

/// All of few.
std::string describe_ranks(const std::vector<int>& ranks) {
  constexpr std::size_t kMost = 8;
  if (ranks.size() > kMost) {
    return fmt::format("on {} ranks, the first of which is {}", ranks.size(), ranks.front());
  }
  return fmt::format("on rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

std::string describe(const Finding& worst, const VerifyDifference& difference) {
  const std::string ranks = describe_ranks(difference.ranks);
  if (worst.at.empty() && worst.value.empty()) {
    return fmt::format("{}, {} {}", worst.name, worst.layout, ranks);
  }
  return fmt::format(
      "{}, {}, is not one rank's: at [{}] it is {}, one rank has {} (off by {:.3g} of values up to "
      "{:.3g}; rounding makes up to {:.2g}), {}",
      worst.name, worst.layout, fmt::join(worst.at, ", "), worst.value, worst.recorded,
      worst.distance, worst.largest, difference.allowed, ranks);
}

VerifyDifference difference_of(const OfRanks& tensor, double allowed) {
  VerifyDifference difference;
  difference.allowed = allowed;
  const Finding* worst = &tensor.findings.front().second;
  for (const auto& [rank, finding] : tensor.findings) {
    if (finding.distance > allowed) {
      difference.ranks.push_back(rank);
    }
    if (finding.distance > worst->distance) {
      worst = &finding;
    }
  }
  difference.fqn = worst->fqn;
  difference.difference = worst->distance;
  difference.text = describe(*worst, difference);
  return difference;
}

}  // namespace

Together put_together(const std::vector<Finding>& own, const DeviceMesh& mesh) {
  const std::vector<OfRanks> tensors = gather(own, mesh);
  double of_kind = 0;
  for (const OfRanks& tensor : tensors) {
    of_kind = std::max(of_kind, tensor.largest(&Finding::largest));
  }
  Together together;
  for (const OfRanks& tensor : tensors) {
    const double epsilon = tensor.largest(&Finding::epsilon);
    // The last term is for zeros that rounding has made something else, against what they are
    // added to.
    const double allowed = kNoises * tensor.largest(&Finding::noise) +
                           kRoundings * epsilon * tensor.largest(&Finding::largest) +
                           epsilon * of_kind;
    const double distance = tensor.largest(&Finding::distance);
    if (distance > allowed) {
      together.differences.push_back(difference_of(tensor, allowed));
    } else if (of_kind > 0) {
      together.largest = std::max(together.largest, distance / of_kind);
    }
  }
  return together;
}

}  // namespace tessera::observe
