#include <ATen/Functions.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string_view>
#include <variant>

#include "rank/rank.h"
#include "tessera/comm/detail/agreement.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/core/detail/environment.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/random.h"
#include "tessera/kernels/detail/fake_state.h"
#include "tessera/kernels/fake_mode.h"

namespace tessera {

// Functions that compare values between all ranks of a mesh, or make one decision for all ranks.
// Each function first finishes asynchronous redistributions.

bool detail::checks_agreement() {
#ifdef NDEBUG
  constexpr bool kDefault = false;
#else
  constexpr bool kDefault = true;
#endif
  return debug_checks(kDefault);
}

bool detail::checks_calls() {
  return RankThread::here().checks_calls;
}

void detail::run_or_fail_together(const DeviceMesh& mesh, std::string_view what,
                                  const std::function<void()>& work) {
  const auto failure =
      comm::first_failure(flush_pending_transfers(mesh.group_of_all_ranks()), mesh.device(), work);
  if (failure) {
    fail(what, " failed on rank ", mesh.ranks()[static_cast<std::size_t>(failure->rank)], ": ",
         failure->message, "; correct the values on that rank, for example an index out of range");
  }
}

void detail::check_replicated(const DeviceMesh& mesh, std::string_view what,
                              const std::vector<at::Tensor>& tensors) {
  std::vector<Replica> replicas;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    replicas.push_back({fmt::format("plain tensor {}", i), tensors[i]});
  }
  check_replicas(peers_of(mesh), replicas, Equality::kBitwise,
                 fmt::format("{}{} requires equal plain tensors on every rank", what, in_module()),
                 "make the plain tensors equal on all ranks, distribute them, or convert the "
                 "distributed tensors with DistributedTensor(x).full_tensor()");
}

}  // namespace tessera

namespace tessera::detail {

// check_replicas() finds replicas (tensors that must be equal on all ranks) that differ. Ranks
// exchange a hash in CPU memory. Values are sent only for the error message, in blocks to save
// memory.

namespace {

using Numbers = std::vector<std::int64_t>;

std::int64_t hash_of_text(std::string_view text) {
  return std::bit_cast<std::int64_t>(std::uint64_t{std::hash<std::string_view>{}(text)});
}

std::string kind_of(const Replica& replica) {
  return replica.local.defined() ? fmt::format("[{}] of {}", fmt::join(replica.local.sizes(), ", "),
                                               c10::toString(replica.local.scalar_type()))
                                 : "none";
}

Numbers hashes_of(const std::vector<Replica>& replicas) {
  Numbers hashes;
  for (const Replica& replica : replicas) {
    hashes.push_back(hash_of_text(replica.name + ": " + kind_of(replica)));
    hashes.push_back(hash_of_values(replica.local));
  }
  return hashes;
}

std::int64_t joined(const Numbers& hashes) {
  return hash_of_text(
      {reinterpret_cast<const char*>(hashes.data()), hashes.size() * sizeof(hashes[0])});
}

struct Difference {
  std::size_t peer = 0;  ///< the first rank whose element differs from rank 0 of the process group
  std::int64_t element = 0;
  std::string first, other;
};

at::Tensor gathered(const Peers& peers, const at::Tensor& block) {
  const at::Tensor rows = at::empty({peers.group->size(), block.numel()}, block.options());
  peers.group->all_gather(rows, block.contiguous())->wait();
  return rows.cpu();
}

template <class Value>
double largest(const Value* values, std::int64_t count) {
  double result = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const double size = std::abs(static_cast<double>(values[i]));
    result = std::isfinite(size) ? std::max(result, size) : result;
  }
  return result;
}

template <class Value>
bool differ(Value a, Value b, double allowed) {
  if (std::bit_cast<std::int64_t>(a) == std::bit_cast<std::int64_t>(b)) {
    return false;
  }
  return allowed == 0 || !(std::abs(static_cast<double>(a) - static_cast<double>(b)) <= allowed);
}

template <class Value>
std::optional<Difference> find_difference(const at::Tensor& rows, double tolerance) {
  const auto* values = rows.const_data_ptr<Value>();
  const std::int64_t count = rows.size(1);
  const double allowed = tolerance == 0 ? 0 : tolerance * largest(values, rows.numel());
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::int64_t peer = 1; peer < rows.size(0); ++peer) {
      const Value other = values[peer * count + i];
      if (differ(values[i], other, allowed)) {
        return Difference{static_cast<std::size_t>(peer), i, fmt::format("{}", values[i]),
                          fmt::format("{}", other)};
      }
    }
  }
  return std::nullopt;
}

/// Finds the first element of a tensor that differs between the ranks of `peers`. Returns the same
/// result on all ranks. Gathers values in blocks, to save memory. Collective.
std::optional<Difference> first_difference(const Peers& peers, Equality equality,
                                           const at::Tensor& local) {
  constexpr std::int64_t kBlock = std::int64_t{1} << 16;
  const at::Tensor real = local.is_complex() ? at::view_as_real(local.resolve_conj()) : local;
  const bool floats = real.is_floating_point();
  const double tolerance =
      floats && equality == Equality::kRounded ? tolerance_of(real.scalar_type()) : 0;
  const at::Tensor flat = real.reshape({-1});
  for (std::int64_t begin = 0; begin < flat.numel(); begin += kBlock) {
    const at::Tensor rows =
        gathered(peers, flat.narrow(0, begin, std::min(kBlock, flat.numel() - begin))
                            .to(peers.device, floats ? at::kDouble : at::kLong));
    if (auto found = floats ? find_difference<double>(rows, tolerance)
                            : find_difference<std::int64_t>(rows, tolerance)) {
      found->element = (found->element + begin) / (local.is_complex() ? 2 : 1);
      return found;
    }
  }
  return std::nullopt;
}

std::string index_of(std::int64_t element, c10::IntArrayRef sizes) {
  std::vector<std::int64_t> index(sizes.size());
  for (std::size_t dim = sizes.size(); dim-- > 0;) {
    index[dim] = element % sizes[dim];
    element /= sizes[dim];
  }
  return fmt::format("[{}]", fmt::join(index, ", "));
}

std::vector<std::size_t> peers_that_differ(const std::vector<Numbers>& all, std::size_t i) {
  std::vector<std::size_t> peers;
  for (std::size_t peer = 1; peer < all.size(); ++peer) {
    if (all[peer][i] != all[0][i]) {
      peers.push_back(peer);
    }
  }
  return peers;
}

/// Throws Error for the first of `replicas` (tensors that must be equal on all ranks) whose values
/// differ by more than `equality` permits. Called if hashes differ. Collective.
void report_difference(const Peers& peers, const std::vector<Replica>& replicas, Equality equality,
                       const std::string& what, const std::string& remedy, const Numbers& hashes) {
  const int first = peers.ranks[0];
  const auto counts = comm::gather_on_hosts(*peers.group, {std::ssize(replicas)});
  const std::vector<std::size_t> shorter = peers_that_differ(counts, 0);
  TESSERA_CHECK(shorter.empty(), what, ": rank ", first, " has ", counts[0][0],
                " tensors that must be equal on all ranks, but rank ", peers.ranks[shorter.front()],
                " has ", counts[shorter.front()][0], "; construct the same model on every rank");
  const auto ranks_of = [&](const std::vector<std::size_t>& others) {
    std::vector<int> ranks;
    std::ranges::transform(others, std::back_inserter(ranks),
                           [&](std::size_t peer) { return peers.ranks[peer]; });
    return fmt::format("{}", fmt::join(ranks, ", "));
  };
  const auto all = comm::gather_on_hosts(*peers.group, hashes);
  for (std::size_t i = 0; i < replicas.size(); ++i) {
    const Replica& replica = replicas[i];
    const std::vector<std::size_t> of_kind = peers_that_differ(all, 2 * i);
    TESSERA_CHECK(of_kind.empty(), what, ": ", replica.name, " is ", kind_of(replica), " on rank ",
                  peers.ranks[static_cast<std::size_t>(peers.group->rank())],
                  ", but its sizes or type differ between rank ", first, " and ranks ",
                  ranks_of(of_kind), "; ", remedy);
    const std::vector<std::size_t> of_values = peers_that_differ(all, 2 * i + 1);
    if (of_values.empty()) {
      continue;
    }
    const auto found = first_difference(peers, equality, replica.local);
    TESSERA_CHECK(!found, what, ": ", replica.name, " differs from rank ", first, " on ranks ",
                  ranks_of(of_values), ", first at ",
                  index_of(found->element, replica.local.sizes()), ": ", found->first, " on rank ",
                  first, " and ", found->other, " on rank ", peers.ranks[found->peer], "; ",
                  remedy);
  }
}

}  // namespace

double tolerance_of(c10::ScalarType type) {
  switch (type) {
    case c10::kDouble:
      return std::sqrt(std::numeric_limits<double>::epsilon());
    case c10::kFloat:
      return std::sqrt(std::numeric_limits<float>::epsilon());
    case c10::kHalf:
      return std::sqrt(static_cast<float>(std::numeric_limits<c10::Half>::epsilon()));
    default:
      return std::sqrt(static_cast<float>(std::numeric_limits<c10::BFloat16>::epsilon()));
  }
}

std::int64_t hash_of_values(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_meta() || kernels::in_fake_mode()) {
    return 0;
  }
  const at::Tensor host = tensor.resolve_conj().resolve_neg().cpu().contiguous();
  return hash_of_text({static_cast<const char*>(host.const_data_ptr()), host.nbytes()});
}

Peers peers_of(const DeviceMesh& mesh) {
  return {&mesh.group_of_all_ranks(), mesh.ranks(), mesh.device()};
}

Peers peers_along(const DeviceMesh& mesh, int dim) {
  if (mesh.ndim() == 1) {
    return peers_of(mesh);
  }
  std::int64_t stride = 1;
  for (int inner = dim + 1; inner < mesh.ndim(); ++inner) {
    stride *= mesh.size(inner);
  }
  const auto own = std::ranges::find(mesh.ranks(), mesh.world()->rank()) - mesh.ranks().begin();
  const std::int64_t first = own - mesh.local_rank(dim) * stride;
  Peers peers{&mesh.group(dim), {}, mesh.device()};
  for (std::int64_t i = 0; i < mesh.size(dim); ++i) {
    peers.ranks.push_back(mesh.ranks()[static_cast<std::size_t>(first + i * stride)]);
  }
  return peers;
}

void check_replicas(const Peers& peers, const std::vector<Replica>& replicas, Equality equality,
                    const std::string& what, const std::string& remedy) {
  if (peers.group->size() == 1) {
    return;
  }
  const BelowAutograd guard;
  const comm::CallerScope caller("check_replicas");
  flush_pending_transfers(*peers.group);
  const Numbers hashes = hashes_of(replicas);
  const auto all = comm::gather_on_hosts(*peers.group, {joined(hashes)});
  if (std::ranges::any_of(all, [&](const Numbers& own) { return own != all.front(); })) {
    report_difference(peers, replicas, equality, what, remedy, hashes);
  }
}

void push_module_name(std::string fqn) {
  RankThread::here().modules.push_back(std::move(fqn));
}

void pop_module_name() {
  if (std::vector<std::string>& modules = RankThread::here().modules; !modules.empty()) {
    modules.pop_back();
  }
}

std::string in_module() {
  const std::vector<std::string>& names = RankThread::here().modules;
  return names.empty()          ? ""
         : names.back().empty() ? " in the root module"
                                : " in '" + names.back() + "'";
}

// agreed_sizes() gathers the local sizes of a tensor from all ranks, because shards may be uneven,
// and computes the global sizes.

namespace {

using Sizes = std::vector<std::int64_t>;

struct SplitDim {
  std::int64_t dim;
  std::vector<std::size_t> mesh_dims;
};

std::vector<SplitDim> split_dims(const Placements& placements, std::int64_t ndim) {
  std::vector<SplitDim> split;
  for (std::size_t m = 0; m < placements.size(); ++m) {
    if (const auto* shard = std::get_if<Shard>(&placements[m])) {
      const std::int64_t dim = shard->dim < 0 ? shard->dim + ndim : shard->dim;
      auto found = std::ranges::find(split, dim, &SplitDim::dim);
      if (found == split.end()) {
        found = split.insert(split.end(), SplitDim{dim, {}});
      }
      found->mesh_dims.push_back(m);
    }
  }
  return split;
}

/// Whether the local size of the rank at `coordinate` is added to the global size. Of several ranks
/// with copies of a shard, only one rank is counted.
bool counts(const SplitDim& split, const Sizes& coordinate) {
  for (std::size_t m = 0; m < coordinate.size(); ++m) {
    if (coordinate[m] != 0 && std::ranges::find(split.mesh_dims, m) == split.mesh_dims.end()) {
      return false;
    }
  }
  return true;
}

Sizes chunks_of_split(const SplitDim& split, const Layout& layout, const Sizes& sizes,
                      const MeshShape& mesh) {
  Sizes chunks;
  for (std::int64_t rank = 0; rank < mesh.numel(); ++rank) {
    chunks.push_back(local_size(layout, static_cast<int>(split.dim),
                                sizes[static_cast<std::size_t>(split.dim)], mesh.coordinate(rank)));
  }
  return chunks;
}

/// Returns a hash of the properties that all shards of a tensor have in common: the dtype, and the
/// sizes along dimensions that are not sharded.
std::int64_t hash_of_rest(const at::Tensor& local, const std::vector<SplitDim>& split) {
  Sizes sizes = local.sizes().vec();
  for (const SplitDim& each : split) {
    sizes[static_cast<std::size_t>(each.dim)] = -1;
  }
  const std::string text = concat(c10::toString(local.scalar_type()), c10::IntArrayRef(sizes));
  return std::bit_cast<std::int64_t>(stream_of(text.c_str()));
}

/// Exchanges between the ranks: the local sizes along the dimensions in `split`, and the hash from
/// hash_of_rest(). With fake ranks (no communication), returns only this rank's values.
std::vector<Sizes> parts_of(const at::Tensor& local, const std::vector<SplitDim>& split,
                            const DeviceMesh& mesh) {
  Sizes own;
  for (const SplitDim& each : split) {
    own.push_back(local.size(each.dim));
  }
  if (!own.empty()) {
    own.push_back(hash_of_rest(local, split));
  }
  if (own.empty() || local.is_meta()) {
    return std::vector<Sizes>(static_cast<std::size_t>(mesh.size()), own);
  }
  return comm::gather_on_hosts(mesh.group_of_all_ranks(), own);
}

}  // namespace

std::vector<std::int64_t> agreed_sizes(const std::string& what, const at::Tensor& local,
                                       const DeviceMesh& mesh, const Placements& placements) {
  const std::vector<SplitDim> split = split_dims(placements, local.dim());
  const std::vector<Sizes> parts = parts_of(local, split, mesh);
  for (std::size_t rank = 1; rank < parts.size() && !split.empty(); ++rank) {
    TESSERA_CHECK(parts[rank].back() == parts[0].back(), what, ": to place plain tensors as ",
                  to_string(placements), ", rank ", mesh.ranks()[rank], " and rank ",
                  mesh.ranks()[0],
                  " need the same type and the same sizes along the dimensions that are not split; "
                  "this rank has sizes ",
                  local.sizes(), " and type ", c10::toString(local.scalar_type()));
  }
  Sizes sizes = local.sizes().vec();
  for (std::size_t i = 0; i < split.size(); ++i) {
    std::int64_t& whole = sizes[static_cast<std::size_t>(split[i].dim)];
    whole = 0;
    for (std::int64_t rank = 0; rank < mesh.size(); ++rank) {
      if (counts(split[i], mesh.shape().coordinate(rank))) {
        whole += parts[static_cast<std::size_t>(rank)][i];
      }
    }
  }
  const LayoutPtr layout = to_layout(mesh.shape().sizes(), placements, sizes);
  for (std::size_t i = 0; i < split.size(); ++i) {
    Sizes found;
    std::ranges::transform(parts, std::back_inserter(found),
                           [i](const Sizes& part) { return part[i]; });
    const Sizes chunks = chunks_of_split(split[i], *layout, sizes, mesh.shape());
    TESSERA_CHECK(found == chunks, what, ": to place plain tensors as ", to_string(placements),
                  ", the ranks have sizes ", c10::IntArrayRef(found), " along dimension ",
                  split[i].dim, ", but torch.chunk splits size ",
                  sizes[static_cast<std::size_t>(split[i].dim)], " into ", c10::IntArrayRef(chunks),
                  "; split the tensor as torch.chunk does");
  }
  return sizes;
}

}  // namespace tessera::detail
