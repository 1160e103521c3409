#include "verify/judge.h"

#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "compare/difference.h"
#include "compare/rank_parts.h"
#include "tessera/comm/agreement.h"
#include "tessera/dtensor/detail/transfers.h"
#include "verify/pairs.h"

namespace tessera::observe {
namespace {

// The ranks' findings, each on its own tensors, and their combined result.

/// How one tensor of this rank on the mesh compares with that of one rank.
struct Finding {
  std::string name, fqn;            ///< as in SeenTensor
  std::string layout;               ///< on the mesh; or why there is nothing to compare
  std::vector<std::int64_t> at{};   ///< the element that is off by most
  std::string value{}, recorded{};  ///< there, on the mesh and on one rank
  double distance = 0;              ///< infinity: they can't be compared
  double largest = 0;               ///< value of one rank's tensor
  double epsilon = 0;               ///< of the coarser type
  double noise = 0;                 ///< how far rounding moves it on one rank
};

/// The findings of all ranks on tensors of one kind.
struct Together {
  std::vector<VerifyDifference> differences;  ///< in the order of rank 0
  double largest = 0;                         ///< distance that is none, as a share of the kind's
                                              ///< largest value
};

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

/// The same on every rank. Collective over `mesh`.
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

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Finding finding_of(const Pair& pair, const VerifyOptions& options) {
  Finding finding{pair.name, pair.fqn, pair.layout};
  finding.noise = pair.noise;
  if (!pair.on_mesh.defined() && !pair.one_rank.defined()) {
    return finding;
  }
  if (!pair.on_mesh.defined() || !pair.one_rank.defined()) {
    finding.distance = kInfinity;
    finding.layout = fmt::format(
        "exists {}", pair.on_mesh.defined() ? "on the mesh alone" : "on one rank alone, not");
    return finding;
  }
  finding.largest = largest_of(pair.one_rank);
  finding.epsilon =
      std::max({epsilon_of(pair.on_mesh.scalar_type()), epsilon_of(pair.one_rank.scalar_type()),
                options.coarsest ? epsilon_of(*options.coarsest) : 0.0});
  if (pair.on_mesh.sizes() != pair.one_rank.sizes()) {
    finding.distance = kInfinity;
    finding.layout += fmt::format(", is {} on one rank, and so here", layout_of(pair.one_rank));
    return finding;
  }
  if (pair.one_rank.numel() == 0) {
    return finding;
  }
  const Farthest found = farthest(pair.on_mesh, pair.one_rank);
  finding.distance = found.distance;
  finding.at = coordinate_of(found.index, pair.one_rank.sizes());
  finding.value = fmt::format("{:.6g}", found.value);
  finding.recorded = fmt::format("{:.6g}", found.recorded);
  return finding;
}

std::vector<Finding> findings_of(const std::vector<Pair>& pairs, const VerifyOptions& options) {
  std::vector<Finding> findings;
  for (const Pair& pair : pairs) {
    findings.push_back(finding_of(pair, options));
  }
  return findings;
}

/// If samples are split, only the loss, which comes last, can be compared.
std::vector<Finding> of_outputs(std::vector<Pair> pairs, const PairingRanks& ranks,
                                const VerifyOptions& options) {
  if (options.splits_samples) {
    pairs.erase(pairs.begin(), pairs.end() - 1);
  }
  ranks.make_whole(pairs, /*all=*/options.splits_samples);
  if (options.splits_samples) {
    pairs[0].on_mesh = ranks.mean_over_batches(pairs[0].on_mesh);
    pairs[0].one_rank = ranks.mean_over_batches(pairs[0].one_rank);
  }
  return findings_of(pairs, options);
}

std::vector<Finding> of_gradients(std::vector<Pair> pairs, const PairingRanks& ranks,
                                  const VerifyOptions& options) {
  ranks.make_whole(pairs, /*all=*/true);
  for (Pair& pair : pairs) {
    pair.one_rank = ranks.mean_over_batches(pair.one_rank);
    // Whether a parameter that nothing uses has a gradient is FSDP's choice.
    pair.on_mesh = pair.on_mesh.defined() ? pair.on_mesh : at::zeros_like(pair.one_rank);
  }
  return findings_of(pairs, options);
}

void raise(std::vector<double>& noise, const std::vector<SeenTensor>& run,
           const std::vector<SeenTensor>& other) {
  std::map<std::string, at::Tensor> others;
  for (const SeenTensor& tensor : other) {
    others.emplace(tensor.name, tensor.value);
  }
  noise.resize(run.size());
  for (std::size_t i = 0; i < run.size(); ++i) {
    const at::Tensor& ours = run[i].value;
    const at::Tensor& theirs = others[run[i].name];
    const bool alike =
        ours.defined() == theirs.defined() && (!ours.defined() || ours.sizes() == theirs.sizes());
    const double distance = !alike           ? kInfinity
                            : ours.defined() ? farthest(theirs, ours).distance
                                             : 0;
    noise[i] = std::max(noise[i], distance);
  }
}

std::size_t count_modules(const std::vector<SeenTensor>& outputs) {
  std::set<std::string> modules;
  for (const SeenTensor& output : outputs) {
    modules.insert(output.fqn);
  }
  return modules.size();
}

}  // namespace

void raise_noise(Noise& noise, const SeenRun& run, const SeenRun& other) {
  raise(noise.outputs, run.outputs, other.outputs);
  raise(noise.gradients, run.gradients, other.gradients);
}

VerifyReport judge(const SeenRun& on_mesh, const SeenRun& one_rank, const Noise& noise,
                   const DeviceMesh& mesh, const VerifyOptions& options) {
  const PairingRanks ranks(mesh, options.batch_dims);
  const std::vector<Finding> outputs =
      of_outputs(pairs_of(on_mesh.outputs, one_rank.outputs, noise.outputs), ranks, options);
  const std::vector<Finding> gradients = of_gradients(
      pairs_of(on_mesh.gradients, one_rank.gradients, noise.gradients), ranks, options);
  Together of_calls = put_together(outputs, mesh);
  Together of_parameters = put_together(gradients, mesh);
  return {.outputs = std::move(of_calls.differences),
          .gradients = std::move(of_parameters.differences),
          .modules = options.splits_samples ? 0 : count_modules(one_rank.outputs),
          .parameters = gradients.size(),
          .largest = std::max(of_calls.largest, of_parameters.largest)};
}

}  // namespace tessera::observe
