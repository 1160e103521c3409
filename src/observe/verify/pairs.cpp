#include "verify/pairs.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <utility>

#include "compare/difference.h"
#include "compare/rank_parts.h"
#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::observe {
namespace {

/// What one run has of a pair, in one line.
std::string kind_of(const Pair& pair) {
  if (!pair.on_mesh.defined()) {
    return "no " + pair.name;
  }
  return fmt::format("the {}, {}", pair.name,
                     tessera::is_distributed(pair.on_mesh) ? pair.layout : "plain");
}

/// The first line in which two texts differ, of each.
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

/// Whether parts of the tensor may have to be joined.
bool has_other_sizes(const Pair& pair) {
  return pair.on_mesh.defined() && pair.one_rank.defined() &&
         pair.on_mesh.sizes() != pair.one_rank.sizes();
}

/// Where `whole` has several copies of each head, the one that differs most from one rank's; else
/// `whole`.
at::Tensor worst_copy(const at::Tensor& whole, at::IntArrayRef shard, const at::Tensor& one_rank) {
  const at::Tensor stacked =
      one_rank.defined() ? copies_of_heads(whole, shard, one_rank.sizes()) : at::Tensor();
  if (!stacked.defined()) {
    return whole;
  }
  const std::vector<at::Tensor> copies = stacked.unbind();
  return *std::ranges::max_element(
      copies, {}, [&](const at::Tensor& copy) { return farthest(copy, one_rank).distance; });
}

}  // namespace

std::vector<std::string> other_dims(const DeviceMesh& mesh, const std::vector<std::string>& dims) {
  std::vector<std::string> others;
  std::ranges::copy_if(
      mesh.shape().names(), std::back_inserter(others),
      [&](const std::string& name) { return std::ranges::find(dims, name) == dims.end(); });
  return others;
}

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
    pairs.push_back({one_rank[i].name, one_rank[i].fqn,
                     found.empty() ? at::Tensor() : found.mapped(), one_rank[i].value, noise[i]});
  }
  for (const SeenTensor& tensor : on_mesh) {
    if (rest.contains(tensor.name)) {
      pairs.push_back({tensor.name, tensor.fqn, tensor.value, at::Tensor()});
    }
  }
  for (Pair& pair : pairs) {
    pair.layout = pair.on_mesh.defined() ? layout_of(pair.on_mesh) : "";
  }
  return pairs;
}

PairingRanks::PairingRanks(const DeviceMesh& mesh, const std::vector<std::string>& batch_dims)
    : mesh_(mesh) {
  if (!batch_dims.empty()) {
    batches_ = mesh.slice(batch_dims);
  }
  if (const auto others = other_dims(mesh, batch_dims); !others.empty()) {
    peers_ = mesh.slice(others);
  }
}

void PairingRanks::make_whole(std::vector<Pair>& pairs, bool all) const {
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

/// Ranks that make a tensor whole must all have it, or they would wait for one another.
void PairingRanks::agree(const DeviceMesh& among, const std::vector<Pair>& pairs) const {
  std::string own;
  for (const Pair& pair : pairs) {
    own += kind_of(pair) + "\n";
  }
  const std::string problem = among ? disagreement(among, own) : "";
  comm::Communicator& group = flush_pending_transfers(mesh_.group_of_all_ranks());
  comm::run_or_fail_together(group, mesh_.device(),
                             [&] { TESSERA_CHECK(problem.empty(), problem); });
}

std::string PairingRanks::disagreement(const DeviceMesh& among, const std::string& own) const {
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
      "verify: on the mesh rank {} has {}, but rank {} has {}; have every rank make the same calls",
      among.ranks().front(), first, among.ranks()[other], second);
}

/// All ranks join a pair, or none.
void PairingRanks::join_parts(std::vector<Pair>& pairs) const {
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
      join(pairs[i]);
    }
  }
}

/// Chooses the way in which the joined parts differ least from one rank's tensor.
void PairingRanks::join(Pair& pair) const {
  const RankParts parts =
      gather_parts(pair.on_mesh, peers_, BatchGrid(peers_, {}), /*of_batch=*/false);
  const std::vector<std::int64_t> shard = pair.on_mesh.sizes().vec();
  double least = std::numeric_limits<double>::infinity();
  for (const Reading& reading : readings(parts)) {
    // Other readings are the ranks' copies.
    if (reading.size() != 1) {
      continue;
    }
    const at::Tensor joined =
        worst_copy(reading[0].tensor.to(pair.one_rank.device()), shard, pair.one_rank);
    if (joined.sizes() != pair.one_rank.sizes()) {
      continue;
    }
    if (const double distance = farthest(joined, pair.one_rank).distance; distance <= least) {
      least = distance;
      pair.on_mesh = joined;
    }
  }
  pair.layout += " parts";
}

at::Tensor PairingRanks::mean_over_batches(const at::Tensor& tensor) const {
  if (!batches_ || batches_.size() == 1) {
    return tensor;
  }
  at::Tensor mean = tensor.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true).contiguous();
  flush_pending_transfers(batches_.group_of_all_ranks()).all_reduce(mean, ReduceOp::kSum)->wait();
  return mean.div_(batches_.size()).to(tensor.scalar_type());
}

}  // namespace tessera::observe
