// Compares a run of a step on the mesh with a run on one rank. Gathers distributed tensors and
// joins the parts of plain tensors.

#include <ATen/ops/cat.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/serialize.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/agreement.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "verify_parts.h"

namespace tessera::observe {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Converts a tensor to fp64, so that comparing adds no rounding.
at::Tensor as_doubles(const at::Tensor& tensor) {
  return (tensor.is_complex() ? at::view_as_real(tensor) : tensor).to(at::kDouble);
}

/// The element in which two tensors of equal sizes differ most. If several elements differ equally,
/// the first of these elements.
struct Farthest {
  /// The difference of the two values; infinity if exactly one value is NaN or infinite.
  double distance = 0;
  std::int64_t index = 0;  ///< position of the element, in row-major order
  double value = 0, expected = 0;
};

Farthest farthest(const at::Tensor& tensor, const at::Tensor& expected) {
  if (expected.numel() == 0) {
    return {};
  }
  const at::Tensor ours = as_doubles(tensor);
  const at::Tensor theirs = as_doubles(expected);
  const at::Tensor same = ours.eq(theirs).logical_or(ours.isnan().logical_and(theirs.isnan()));
  const at::Tensor apart =
      at::where(same, at::zeros_like(ours), ours.sub(theirs).abs()).nan_to_num(kInfinity).flatten();
  const auto index = apart.argmax().item<std::int64_t>();
  return {apart[index].item<double>(), expected.is_complex() ? index / 2 : index,
          ours.flatten()[index].item<double>(), theirs.flatten()[index].item<double>()};
}

/// Returns the largest finite absolute value in a tensor; 0 if the tensor is empty.
double largest_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return 0;
  }
  return as_doubles(tensor).nan_to_num(0, 0, 0).abs().max().item<double>();
}

std::vector<std::int64_t> coordinate_of(std::int64_t index, at::IntArrayRef sizes) {
  std::vector<std::int64_t> coordinate(sizes.size());
  for (std::size_t dim = sizes.size(); dim-- > 0;) {
    coordinate[dim] = index % sizes[dim];
    index /= sizes[dim];
  }
  return coordinate;
}

/// Returns sizes and layout of a tensor: "[8, 4] on (tp=2) as [Shard(0)]", or "[8, 4], plain".
std::string layout_of(const at::Tensor& tensor) {
  const std::string sizes = fmt::format("[{}]", fmt::join(tensor.sizes(), ", "));
  if (!tessera::is_distributed(tensor)) {
    return sizes + ", plain";
  }
  const ShardingSpec& spec = sharding_spec(tensor);
  std::string placements;
  try {
    placements = to_string(to_placements(*spec.layout, tensor.sizes()));
  } catch (const Error&) {  // no list of placements describes this Layout
    placements = to_string(*spec.layout);
  }
  return fmt::format("{} on {} as {}", sizes, to_string(spec.mesh.shape()), placements);
}

// Some tensor-parallel styles compute each key-value head on several ranks. The copies of a head
// are consecutive along the head dimension, and each rank's shard is one head.

/// Returns the only dimension in which two lists of sizes differ; -1 if the lists are equal or
/// differ in several dimensions.
std::int64_t other_dim(at::IntArrayRef sizes, at::IntArrayRef others) {
  std::int64_t found = -1;
  for (std::size_t dim = 0; sizes.size() == others.size() && dim < sizes.size(); ++dim) {
    if (sizes[dim] != others[dim]) {
      if (found >= 0) {
        return -1;
      }
      found = static_cast<std::int64_t>(dim);
    }
  }
  return found;
}

/// If `whole` has several copies of each head, returns the copy that differs most from `one_rank`.
/// Otherwise returns `whole`.
at::Tensor worst_copy(const at::Tensor& whole, at::IntArrayRef shard, const at::Tensor& one_rank) {
  if (!one_rank.defined() || shard.size() != static_cast<std::size_t>(one_rank.dim())) {
    return whole;
  }
  const std::int64_t dim = other_dim(whole.sizes(), one_rank.sizes());
  if (dim < 0) {
    return whole;
  }
  const std::int64_t head = shard[static_cast<std::size_t>(dim)], once = one_rank.size(dim);
  if (head == 0 || once == 0 || once % head != 0 || whole.size(dim) % once != 0) {
    return whole;
  }
  const std::vector<at::Tensor> copies =
      whole.unflatten(dim, {once / head, whole.size(dim) / once, head})
          .movedim(dim + 1, 0)
          .flatten(dim + 1, dim + 2)
          .unbind();
  return *std::ranges::max_element(
      copies, {}, [&](const at::Tensor& copy) { return farthest(copy, one_rank).distance; });
}

/// A tensor's values in the run on the mesh and in the one-rank run. A value is an undefined tensor
/// if its run lacks the tensor.
struct Pair {
  SeenTensor of;  ///< the tensor's name and module; the member `of.value` is not used
  at::Tensor on_mesh, one_rank;
  double noise = 0;
  std::string layout{};   ///< layout of the tensor in the run on the mesh, for messages
  std::string missing{};  ///< reason why only one of the runs has the tensor
};

/// Returns the reason why one run lacks a tensor, for messages: "is never called on the mesh".
std::string why_missing(const SeenTensor& tensor, const SeenRun& on_mesh, const SeenRun& one_rank) {
  if (tensor.call == 0) {
    return "exists in only one of the two runs";
  }
  const auto count = [&](const SeenRun& run) {
    const auto found = run.calls.find(tensor.fqn);
    return found == run.calls.end() ? 0 : found->second;
  };
  const auto times = [](int calls) {
    return calls == 0   ? std::string("never called")
           : calls == 1 ? std::string("called once")
                        : fmt::format("called {} times", calls);
  };
  const int here = count(on_mesh), there = count(one_rank);
  if (here == there) {
    return "has a different number of tensors in the two runs";
  }
  return here == 0
             ? "is never called on the mesh"
             : fmt::format("is {} on the mesh, and {} on one rank", times(here), times(there));
}

/// Pairs each tensor of the one-rank run with the same tensor of the mesh run. `noise`: how much
/// rounding changes each tensor of the one-rank run.
std::vector<Pair> pairs_of(const std::vector<SeenTensor>& on_mesh,
                           const std::vector<SeenTensor>& one_rank,
                           const std::vector<double>& noise) {
  std::map<std::string, at::Tensor> rest;
  for (const SeenTensor& tensor : on_mesh) {
    rest.emplace(tensor.name, tensor.value);
  }
  std::vector<Pair> pairs;
  for (std::size_t i = 0; i < one_rank.size(); ++i) {
    const auto found = rest.extract(one_rank[i].name);
    pairs.push_back(
        {one_rank[i], found.empty() ? at::Tensor() : found.mapped(), one_rank[i].value, noise[i]});
  }
  for (const SeenTensor& tensor : on_mesh) {
    if (rest.contains(tensor.name)) {
      pairs.push_back({tensor, tensor.value, at::Tensor()});
    }
  }
  for (Pair& pair : pairs) {
    pair.of.value = at::Tensor();
    pair.layout = pair.on_mesh.defined() ? layout_of(pair.on_mesh) : "missing on the mesh";
  }
  return pairs;
}

/// Pairs the tensors of module calls in both runs. Omits an input that only one run has.
std::vector<Pair> pairs_of_calls(const SeenRun& on_mesh, const SeenRun& one_rank,
                                 const std::vector<double>& noise) {
  std::vector<Pair> pairs = pairs_of(on_mesh.tensors, one_rank.tensors, noise);
  std::erase_if(pairs, [](const Pair& pair) {
    return pair.of.is_input && pair.on_mesh.defined() != pair.one_rank.defined();
  });
  for (Pair& pair : pairs) {
    if (pair.on_mesh.defined() != pair.one_rank.defined()) {
      pair.missing = why_missing(pair.of, on_mesh, one_rank);
    }
  }
  return pairs;
}

std::string kind_of(const Pair& pair) {
  if (!pair.on_mesh.defined()) {
    return "no " + pair.of.name;
  }
  return fmt::format("the {}, {}", pair.of.name,
                     tessera::is_distributed(pair.on_mesh) ? pair.layout : "plain");
}

/// Returns the first line in which two texts differ, from `a` and from `b`.
std::pair<std::string, std::string> first_lines_apart(const std::string& a, const std::string& b) {
  const auto end = static_cast<std::size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
  const std::size_t before = end == 0 ? std::string::npos : a.rfind('\n', end - 1);
  const std::size_t begin = before == std::string::npos ? 0 : before + 1;
  const auto line = [begin](const std::string& text) {
    return begin == text.size() ? "nothing else"
                                : text.substr(begin, text.find('\n', begin) - begin);
  };
  return {line(a), line(b)};
}

/// Whether a tensor has other sizes on the mesh than on one rank. The mesh's tensor can then be a
/// part of the one-rank tensor.
bool has_other_sizes(const Pair& pair) {
  return pair.on_mesh.defined() && pair.one_rank.defined() &&
         pair.on_mesh.sizes() != pair.one_rank.sizes();
}

std::string to_bytes(const at::Tensor& tensor) {
  const std::vector<char> bytes =
      torch::pickle_save(tensor.defined() ? c10::IValue(tensor.cpu()) : c10::IValue());
  return {bytes.begin(), bytes.end()};
}

at::Tensor from_bytes(const std::string& bytes) {
  const c10::IValue value = torch::pickle_load({bytes.begin(), bytes.end()});
  return value.isNone() ? at::Tensor() : value.toTensor();
}

/// Concatenates the parts of a tensor along `dim`; nullopt if the other dimensions differ in size.
std::optional<at::Tensor> joined(const std::vector<at::Tensor>& parts, std::int64_t dim) {
  std::vector<std::int64_t> like = parts.front().sizes().vec();
  for (const at::Tensor& part : parts) {
    std::vector<std::int64_t> sizes = part.sizes().vec();
    if (sizes.size() != like.size()) {
      return std::nullopt;
    }
    sizes[static_cast<std::size_t>(dim)] = like[static_cast<std::size_t>(dim)];
    if (sizes != like) {
      return std::nullopt;
    }
  }
  return at::cat(parts, dim);
}

/// Two submeshes: the ranks that have different samples, and the ranks that have equal samples.
class PairingRanks {
 public:
  PairingRanks(const DeviceMesh& mesh, const std::vector<std::string>& batch_dims) : mesh_(mesh) {
    if (!batch_dims.empty()) {
      batches_ = mesh.slice(batch_dims);
    }
    if (const auto others = other_dims(mesh, batch_dims); !others.empty()) {
      peers_ = mesh.slice(others);
    }
  }

  /// Gathers distributed tensors, and joins plain tensors that are parts of a larger tensor.
  /// Collective. Throws Error, on every rank, if ranks with the same samples (all ranks if `all`)
  /// have different tensors.
  void make_whole(std::vector<Pair>& pairs, bool all) const {
    agree(all ? mesh_ : peers_, pairs);
    for (Pair& pair : pairs) {
      if (pair.on_mesh.defined() && tessera::is_distributed(pair.on_mesh)) {
        const std::vector<std::int64_t> shard = local_tensor(pair.on_mesh).sizes().vec();
        pair.on_mesh =
            worst_copy(DistributedTensor(pair.on_mesh).full_tensor(), shard, pair.one_rank);
      }
    }
    if (peers_) {
      join_parts(pairs);
    }
  }

  /// Returns the mean of `tensor` over the ranks that have different samples. Collective.
  at::Tensor mean_over_batches(const at::Tensor& tensor) const {
    if (!batches_ || batches_.size() == 1) {
      return tensor;
    }
    at::Tensor mean = tensor.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true).contiguous();
    flush_pending_transfers(batches_.group_of_all_ranks()).all_reduce(mean, ReduceOp::kSum)->wait();
    return mean.div_(batches_.size()).to(tensor.scalar_type());
  }

 private:
  /// Throws Error unless all ranks have the same tensors. Gathering a distributed tensor is
  /// collective, so ranks with different tensors would wait for one another forever.
  void agree(const DeviceMesh& among, const std::vector<Pair>& pairs) const {
    std::string own;
    for (const Pair& pair : pairs) {
      own += kind_of(pair) + "\n";
    }
    const std::string problem = among ? disagreement(among, own) : "";
    comm::Communicator& group = flush_pending_transfers(mesh_.group_of_all_ranks());
    comm::run_or_fail_together(group, mesh_.device(),
                               [&] { TESSERA_CHECK(problem.empty(), problem); });
  }

  std::string disagreement(const DeviceMesh& among, const std::string& own) const {
    comm::Communicator& group = flush_pending_transfers(among.group_of_all_ranks());
    const auto hash = static_cast<std::int64_t>(std::hash<std::string>{}(own));
    const std::vector<int> others = comm::ranks_that_differ(group, mesh_.device(), hash);
    if (others.empty()) {
      return {};
    }
    const auto texts = comm::gather_texts(group, mesh_.device(), own);
    const auto other = static_cast<std::size_t>(others.front());
    const auto [first, second] = first_lines_apart(texts.front(), texts[other]);
    return fmt::format(
        "verify: on the mesh rank {} has {}, but rank {} has {}; call the same modules in the same "
        "order on every rank",
        among.ranks().front(), first, among.ranks()[other], second);
  }

  /// Joins plain tensors that are parts of one tensor on several ranks. Joining is collective, so
  /// either all ranks join the parts of a Pair, or no rank does.
  void join_parts(std::vector<Pair>& pairs) const {
    std::vector<std::int64_t> own;
    for (const Pair& pair : pairs) {
      own.push_back(has_other_sizes(pair) ? 1 : 0);
    }
    if (own.empty()) {
      return;
    }
    comm::Communicator& group = flush_pending_transfers(peers_.group_of_all_ranks());
    const auto all = comm::gather_values(group, mesh_.device(), own);
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      if (std::ranges::any_of(all, [i](const auto& flags) { return flags[i] != 0; })) {
        join(group, pairs[i]);
      }
    }
  }

  /// Parts are joined along the dimension for which the joined tensor differs least from the
  /// one-rank tensor.
  void join(comm::Communicator& group, Pair& pair) const {
    std::vector<at::Tensor> parts;
    for (const std::string& bytes :
         comm::gather_texts(group, mesh_.device(), to_bytes(pair.on_mesh))) {
      parts.push_back(from_bytes(bytes));
    }
    const std::vector<std::int64_t> shard = pair.on_mesh.sizes().vec();
    double least = kInfinity;
    for (std::int64_t dim = 0; parts.size() > 1 && dim < parts.front().dim(); ++dim) {
      const std::optional<at::Tensor> whole = joined(parts, dim);
      if (!whole) {
        continue;
      }
      const at::Tensor copy = worst_copy(whole->to(pair.one_rank.device()), shard, pair.one_rank);
      if (copy.sizes() != pair.one_rank.sizes()) {
        continue;
      }
      if (const double distance = farthest(copy, pair.one_rank).distance; distance <= least) {
        least = distance;
        pair.on_mesh = copy;
      }
    }
    pair.layout += " parts";
  }

  DeviceMesh mesh_;
  DeviceMesh batches_;  ///< ranks with different samples; undefined: all have equal samples
  DeviceMesh peers_;    ///< ranks with equal samples; undefined: all have different samples
};

/// The comparison of one tensor on this rank: the value on the mesh against the one-rank value.
struct Finding {
  std::string name, fqn, caller;
  int call = 0, parent = 0;
  bool is_input = false;
  std::string layout;               ///< layout on the mesh, or why the tensor cannot be compared
  std::vector<std::int64_t> at{};   ///< index of the element that differs most
  std::string value{}, expected{};  ///< the element's value on the mesh and on one rank
  double distance = 0;              ///< largest difference of elements; infinity if not comparable
  double largest = 0;               ///< largest absolute value in the one-rank tensor
  double epsilon = 0;               ///< the larger rounding unit of the two tensors' dtypes
  double noise = 0;                 ///< how much rounding changes the one-rank tensor
};

/// The findings of all ranks about the tensors of module calls, or about the gradients.
struct Together {
  std::vector<VerifyDifference> differences;
  double largest = 0;   ///< largest difference within tolerance, relative to the largest value
  std::string cause{};  ///< where to look for the cause of the first difference
};

/// A difference may be this many times the measured rounding noise. A mesh sums in another order
/// than one rank, and therefore rounds differently.
constexpr double kNoises = 8;
/// A difference may also be this many units in the last place (ulp) of the tensor's largest value,
/// because the measured rounding noise can miss some sums.
constexpr double kRoundings = 8;

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Finding, name, fqn, caller, call, parent, is_input, layout, at,
                                   value, expected, distance, largest, epsilon, noise)

/// What all ranks have found about one tensor.
struct OfRanks {
  std::vector<std::pair<int, Finding>> findings;

  const Finding& first() const { return findings.front().second; }
  double largest(double Finding::*of) const {
    double most = 0;
    for (const auto& [rank, finding] : findings) {
      most = std::max(most, finding.*of);
    }
    return most;
  }
};

/// Gathers the findings of all ranks: first the tensors of rank 0, then the tensors that only other
/// ranks found.
std::vector<OfRanks> gather(const std::vector<Finding>& own, const DeviceMesh& mesh) {
  // Findings are sent as CBOR, because JSON text cannot represent infinity.
  std::string text;
  nlohmann::json::to_cbor(own, text);
  comm::Communicator& group = flush_pending_transfers(mesh.group_of_all_ranks());
  const auto texts = comm::gather_texts(group, mesh.device(), text);
  std::vector<OfRanks> all;
  std::map<std::string, std::size_t> index;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    for (Finding& finding : nlohmann::json::from_cbor(texts[rank]).get<std::vector<Finding>>()) {
      const auto [place, is_new] = index.emplace(finding.name, all.size());
      if (is_new) {
        all.emplace_back();
      }
      all[place->second].findings.emplace_back(mesh.ranks()[rank], std::move(finding));
    }
  }
  return all;
}

/// Returns a list of ranks for messages: complete for a few ranks, shortened for many ranks.
std::string describe_ranks(const std::vector<int>& ranks) {
  constexpr std::size_t kMost = 8;
  if (ranks.size() > kMost) {
    return fmt::format("on {} ranks, the first of which is {}", ranks.size(), ranks.front());
  }
  return fmt::format("on rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

VerifyDifference difference_of(const OfRanks& tensor, double allowed) {
  std::vector<int> ranks;
  const Finding* worst = &tensor.first();
  for (const auto& [rank, finding] : tensor.findings) {
    if (finding.distance > allowed) {
      ranks.push_back(rank);
    }
    if (finding.distance > worst->distance) {
      worst = &finding;
    }
  }
  if (worst->at.empty() && worst->value.empty()) {
    return {worst->fqn,
            fmt::format("{}, {} {}", worst->name, worst->layout, describe_ranks(ranks))};
  }
  return {worst->fqn,
          fmt::format("{}, {}, differs from the one-rank run: at [{}] it is {}, one rank has {} "
                      "(off by {:.3g} of values up to {:.3g}; rounding makes up to {:.2g}), {}",
                      worst->name, worst->layout, fmt::join(worst->at, ", "), worst->value,
                      worst->expected, worst->distance, worst->largest, allowed,
                      describe_ranks(ranks))};
}

std::string quoted(const std::string& fqn) {
  return fqn.empty() ? "the model" : "'" + fqn + "'";
}

std::string cause_of(const std::vector<OfRanks>& tensors, const std::vector<bool>& differs,
                     std::size_t first) {
  const Finding& output = tensors[first].first();
  if (output.call == 0) {
    return "all outputs before are equal, so look at the step: the loss, and what it computes from "
           "the model's outputs";
  }
  if (output.distance == kInfinity && output.value.empty() && output.layout.starts_with("is ")) {
    return "all outputs before are equal, so look at the forward of " + quoted(output.caller) +
           ", which calls it";
  }
  // Looks for the first differing input: in the module call, then in the enclosing module calls.
  std::set<int> calls{output.call};
  std::map<int, int> parents;
  for (const OfRanks& tensor : tensors) {
    parents[tensor.first().call] = tensor.first().parent;
  }
  for (int call = output.call; parents[call] > 0; call = parents[call]) {
    calls.insert(parents[call]);
  }
  bool has_inputs = false;
  for (std::size_t i = 0; i < first; ++i) {
    const Finding& input = tensors[i].first();
    if (!input.is_input || !calls.contains(input.call)) {
      continue;
    }
    has_inputs = has_inputs || input.call == output.call;
    if (differs[i]) {
      const bool is_same = input.call == output.call;
      return fmt::format("{} differs already: look at {} before it calls {}",
                         is_same ? "its input" : "the input of " + quoted(input.fqn),
                         input.parent == 0 ? "the step" : "the forward of " + quoted(input.caller),
                         quoted(input.fqn));
    }
  }
  return fmt::format(
      "{}all outputs before are equal, so look at the forward of {}, and at its style in the plan",
      has_inputs ? "its inputs and " : "", quoted(output.fqn));
}

/// Combines the findings of all ranks; the result is equal on every rank. Collective over `mesh`.
Together put_together(const std::vector<Finding>& own, const DeviceMesh& mesh) {
  const std::vector<OfRanks> tensors = gather(own, mesh);
  double of_kind = 0;
  for (const OfRanks& tensor : tensors) {
    of_kind = std::max(of_kind, tensor.first().is_input ? 0 : tensor.largest(&Finding::largest));
  }
  Together together;
  std::vector<bool> differs;
  std::size_t first = tensors.size();
  for (const OfRanks& tensor : tensors) {
    const double epsilon = tensor.largest(&Finding::epsilon);
    // The term epsilon * of_kind allows values near 0 where zeros are expected. `of_kind` is the
    // largest value in all tensors that are not inputs.
    const double allowed = kNoises * tensor.largest(&Finding::noise) +
                           kRoundings * epsilon * tensor.largest(&Finding::largest) +
                           epsilon * of_kind;
    const double distance = tensor.largest(&Finding::distance);
    differs.push_back(distance > allowed);
    if (tensor.first().is_input) {
      continue;
    }
    if (distance > allowed) {
      first = std::min(first, differs.size() - 1);
      together.differences.push_back(difference_of(tensor, allowed));
    } else if (of_kind > 0) {
      together.largest = std::max(together.largest, distance / of_kind);
    }
  }
  if (first < tensors.size()) {
    together.cause = cause_of(tensors, differs, first);
  }
  return together;
}

Finding finding_of(const Pair& pair, const VerifyOptions& options) {
  Finding finding{.name = pair.of.name,
                  .fqn = pair.of.fqn,
                  .caller = pair.of.caller,
                  .call = pair.of.call,
                  .parent = pair.of.parent,
                  .is_input = pair.of.is_input,
                  .layout = pair.layout};
  finding.noise = pair.noise;
  if (!pair.on_mesh.defined() && !pair.one_rank.defined()) {
    return finding;
  }
  if (!pair.on_mesh.defined() || !pair.one_rank.defined()) {
    finding.distance = kInfinity;
    finding.layout = pair.missing;
    return finding;
  }
  finding.largest = largest_of(pair.one_rank);
  finding.epsilon =
      std::max({epsilon_of(pair.on_mesh.scalar_type()), epsilon_of(pair.one_rank.scalar_type()),
                options.coarsest ? epsilon_of(*options.coarsest) : 0.0});
  if (pair.on_mesh.sizes() != pair.one_rank.sizes()) {
    finding.distance = kInfinity;
    finding.layout += fmt::format(", but is {} on one rank; seen", layout_of(pair.one_rank));
    return finding;
  }
  if (pair.one_rank.numel() == 0) {
    return finding;
  }
  const Farthest found = farthest(pair.on_mesh, pair.one_rank);
  finding.distance = found.distance;
  finding.at = coordinate_of(found.index, pair.one_rank.sizes());
  finding.value = fmt::format("{:.6g}", found.value);
  finding.expected = fmt::format("{:.6g}", found.expected);
  return finding;
}

std::vector<Finding> findings_of(const std::vector<Pair>& pairs, const VerifyOptions& options) {
  std::vector<Finding> findings;
  for (const Pair& pair : pairs) {
    findings.push_back(finding_of(pair, options));
  }
  return findings;
}

/// Returns the findings on the tensors of module calls. If the step splits samples, only the loss,
/// which is the last tensor, can be compared.
std::vector<Finding> of_calls(std::vector<Pair> pairs, const PairingRanks& ranks,
                              const VerifyOptions& options) {
  if (options.splits_samples) {
    std::erase_if(pairs, [](const Pair& pair) { return pair.of.call != 0; });
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
    // A missing gradient counts as zeros, because FSDP can give an unused parameter a gradient of
    // zeros or no gradient.
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

std::size_t count_modules(const std::vector<SeenTensor>& tensors) {
  std::set<std::string> modules;
  for (const SeenTensor& tensor : tensors) {
    if (!tensor.is_input) {
      modules.insert(tensor.fqn);
    }
  }
  return modules.size();
}

}  // namespace

double epsilon_of(c10::ScalarType type) {
  switch (c10::toRealValueType(type)) {
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kFloat:
      return std::numeric_limits<float>::epsilon();
    case at::kHalf:
      return 1.0 / (1 << 10);
    case at::kBFloat16:
      return 1.0 / (1 << 7);
    default:
      return 0;
  }
}

std::vector<std::string> other_dims(const DeviceMesh& mesh, const std::vector<std::string>& dims) {
  std::vector<std::string> others;
  std::ranges::copy_if(
      mesh.shape().names(), std::back_inserter(others),
      [&](const std::string& name) { return std::ranges::find(dims, name) == dims.end(); });
  return others;
}

void raise_noise(Noise& noise, const SeenRun& run, const SeenRun& other) {
  raise(noise.tensors, run.tensors, other.tensors);
  raise(noise.gradients, run.gradients, other.gradients);
}

VerifyReport compare(const SeenRun& on_mesh, const SeenRun& one_rank, const Noise& noise,
                     const DeviceMesh& mesh, const VerifyOptions& options) {
  const PairingRanks ranks(mesh, options.batch_dims);
  const std::vector<Finding> calls =
      of_calls(pairs_of_calls(on_mesh, one_rank, noise.tensors), ranks, options);
  const std::vector<Finding> gradients = of_gradients(
      pairs_of(on_mesh.gradients, one_rank.gradients, noise.gradients), ranks, options);
  Together outputs = put_together(calls, mesh);
  Together of_parameters = put_together(gradients, mesh);
  return {.outputs = std::move(outputs.differences),
          .gradients = std::move(of_parameters.differences),
          .modules = options.splits_samples ? 0 : count_modules(one_rank.tensors),
          .parameters = gradients.size(),
          .largest = std::max(outputs.largest, of_parameters.largest),
          .cause = std::move(outputs.cause)};
}

}  // namespace tessera::observe
