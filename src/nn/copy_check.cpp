#include "tessera/nn/detail/copy_check.h"
#include "tessera/comm/detail/agreement.h"

#include <ATen/Functions.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <sstream>
#include <string_view>
#include <tuple>
#include <utility>

#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::nn::detail {
namespace {

using tessera::detail::Peers;

/// Maximum number of hashes that a rank sends. Tensors whose copies are on the same ranks share one
/// hash. A model usually needs two or three hashes.
constexpr std::size_t kSets = 6;

std::int64_t hash_of(std::string_view text) {
  return static_cast<std::int64_t>(std::hash<std::string_view>{}(text));
}

/// A summary of a tensor's values: the norm, and the dot product with a fixed vector. Small
/// rounding errors cause small changes of both numbers.
struct Sketch {
  double norm = 0;
  double product = 0;
  /// Permitted difference of two copies, relative to the norm of a copy. With 0 the bits must be
  /// equal.
  double tolerance = 0;
};

Sketch sketch_of(const CopiedTensor& tensor) {
  at::Tensor values = tensor.values.detach().resolve_conj().resolve_neg().cpu();
  if (values.is_complex()) {
    values = at::view_as_real(values);
  }
  Sketch sketch;
  if (tensor.rounded && values.is_floating_point()) {
    sketch.tolerance = tessera::detail::tolerance_of(values.scalar_type());
  }
  values = values.to(at::kDouble).reshape({-1});
  sketch.norm = values.norm().item<double>();
  sketch.product = values.dot(at::cos(at::arange(values.numel(), at::kDouble))).item<double>();
  return sketch;
}

struct Entry {
  std::int64_t place = 0;  ///< result of place_of(): equal for all copies of one tensor
  std::int64_t hash = 0;   ///< hash of the tensor's values; 0 if this rank has no values
  Sketch sketch;
  std::string name;
};

bool differ(const Entry& a, const Entry& b) {
  if (a.hash == b.hash) {
    return false;
  }
  if (a.hash == 0 || b.hash == 0 || a.sketch.tolerance == 0) {
    return true;
  }
  const double norm = std::max(a.sketch.norm, b.sketch.norm);
  if (!std::isfinite(norm)) {
    return std::isfinite(a.sketch.norm) || std::isfinite(b.sketch.norm);
  }
  const double allowed = a.sketch.tolerance * norm;
  return std::abs(a.sketch.norm - b.sketch.norm) > allowed ||
         std::abs(a.sketch.product - b.sketch.product) > allowed;
}

std::string to_line(const Entry& entry) {
  return fmt::format("{} {} {} {} {} {}\n", entry.place, entry.hash, entry.sketch.norm,
                     entry.sketch.product, entry.sketch.tolerance, entry.name);
}

std::vector<Entry> from_lines(const std::string& text) {
  std::vector<Entry> entries;
  std::istringstream in(text);
  std::string norm, product, tolerance;
  Entry entry;
  while (in >> entry.place >> entry.hash >> norm >> product >> tolerance) {
    entry.sketch = {std::stod(norm), std::stod(product), std::stod(tolerance)};
    in.get();
    std::getline(in, entry.name);
    entries.push_back(entry);
  }
  return entries;
}

struct Difference {
  std::size_t first = 0, other = 0;
  std::string name;
  bool none_on_first = false, none_on_other = false;
};

class Comparison {
 public:
  Comparison(const Peers& peers, const std::vector<CopiedTensor>& tensors, const CopyCheck& check)
      : peers_(peers), tensors_(tensors), check_(check) {
    for (const CopiedTensor& tensor : tensors) {
      if (const std::optional<std::int64_t> place = place_of(tensor)) {
        const std::int64_t hash =
            tensor.values.defined() ? tessera::detail::hash_of_values(tensor.values) | 1 : 0;
        entries_.push_back({*place, hash, {}, tensor.name});
        sources_.push_back(&tensor);
      }
    }
  }

  void run() {
    const auto all = comm::gather_on_hosts(*peers_.group, digests());
    if (!may_differ(all)) {
      return;
    }
    std::string lines;
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      if (sources_[i]->values.defined() && !sources_[i]->values.is_meta()) {
        entries_[i].sketch = sketch_of(*sources_[i]);
      }
      lines += to_line(entries_[i]);
    }
    std::vector<std::vector<Entry>> entries;
    for (const std::string& text : comm::gather_texts(*peers_.group, peers_.device, lines)) {
      entries.push_back(from_lines(text));
    }
    if (const std::optional<Difference> found = first_difference(entries)) {
      refuse(*found);
    }
  }

 private:
  std::vector<bool> distinct_dims(const CopiedTensor& tensor, const DeviceMesh& root) const {
    const DeviceMesh& mesh = tensor.slot->distinct_along();
    return mesh && mesh.root() == root
               ? dims_in_root(mesh)
               : std::vector<bool>(static_cast<std::size_t>(root.ndim()), false);
  }

  static DeviceMesh root_of(const CopiedTensor& tensor, const CopyCheck& check) {
    const at::Tensor& parameter = tensor.slot->persistent();
    return is_distributed(parameter) ? sharding_spec(parameter).mesh.root() : check.root;
  }

  /// Returns a hash of the shard's place on the mesh, equal on all ranks that have a copy of the
  /// shard; nullopt if a tensor has no copies.
  std::optional<std::int64_t> place_of(const CopiedTensor& tensor) const {
    const at::Tensor& parameter = tensor.slot->persistent();
    const DeviceMesh root = root_of(tensor, check_);
    if (!root) {
      return tensor.slot->distinct_along() ? std::nullopt : std::optional(hash_of("plain"));
    }
    if (!root.contains_this_rank()) {
      return std::nullopt;
    }
    std::string place = fmt::format("{}", fmt::join(root.ranks(), ","));
    std::vector<bool> parts(static_cast<std::size_t>(root.ndim()), false);
    // Whether the parameter's mesh has only some ranks of a root mesh dimension, for example if
    // unflatten() has split the dimension.
    bool is_slice = false;
    if (is_distributed(parameter)) {
      const DeviceMesh& mesh = sharding_spec(parameter).mesh;
      if (!mesh.contains_this_rank()) {
        return std::nullopt;
      }
      if (!tensor.same_for_all_parts) {
        place += fmt::format(" [{}] [{}]", fmt::join(mesh.shape().sizes(), ","),
                             fmt::join(mesh.coordinate(), ","));
        parts = dims_in_root(mesh);
        std::int64_t whole = 1;
        for (std::size_t d = 0; d < parts.size(); ++d) {
          whole *= parts[d] ? root.size(static_cast<int>(d)) : 1;
        }
        is_slice = whole != mesh.size();
      }
    }
    const std::vector<bool> distinct = distinct_dims(tensor, root);
    std::int64_t copies = 1;
    for (std::size_t d = 0; d < parts.size(); ++d) {
      if (distinct[d]) {
        place += fmt::format(" {}:{}", d, root.coordinate()[d]);
      } else if (!parts[d] || is_slice) {
        copies *= root.size(static_cast<int>(d));
      }
    }
    return copies == 1 ? std::nullopt : std::optional(hash_of(place));
  }

  /// Returns two hashes for each distinct Entry::place, in order of first appearance: the place,
  /// and a hash that combines the names and values of all tensors with the place.
  std::vector<std::int64_t> digests() const {
    std::vector<std::pair<std::int64_t, std::int64_t>> sets;
    for (const Entry& entry : entries_) {
      auto found =
          std::ranges::find(sets, entry.place, &std::pair<std::int64_t, std::int64_t>::first);
      if (found == sets.end()) {
        found = sets.insert(sets.end(), {entry.place, 0});
      }
      found->second = hash_of(fmt::format("{} {} {}", found->second, entry.name, entry.hash));
    }
    std::vector<std::int64_t> numbers(2 * kSets, 0);
    for (std::size_t i = 0; i < sets.size(); ++i) {
      const std::size_t at = 2 * std::min(i, kSets - 1);
      numbers[at] =
          i < kSets ? sets[i].first : hash_of(fmt::format("{} {}", numbers[at], sets[i].first));
      numbers[at + 1] = hash_of(fmt::format("{} {}", numbers[at + 1], sets[i].second));
    }
    return numbers;
  }

  /// Whether two ranks have sent different hashes for one Entry::place. The result is the same on
  /// all ranks.
  static bool may_differ(const std::vector<std::vector<std::int64_t>>& all) {
    std::map<std::int64_t, std::int64_t> known;
    for (const std::vector<std::int64_t>& numbers : all) {
      for (std::size_t i = 0; i < numbers.size(); i += 2) {
        const auto found = known.emplace(numbers[i], numbers[i + 1]).first;
        if (found->second != numbers[i + 1]) {
          return true;
        }
      }
    }
    return false;
  }

  /// Returns the first difference between copies, the same on all ranks. Compares each copy with
  /// the lowest rank's copy. Prefers differences from the lowest rank's neighbour along a mesh
  /// dimension.
  std::optional<Difference> first_difference(const std::vector<std::vector<Entry>>& all) const {
    struct Holder {
      std::size_t peer = 0, index = 0;
    };
    std::map<std::tuple<std::int64_t, std::string, int>, Holder> holders;
    std::optional<Difference> found;
    std::array<std::size_t, 4> best{};
    for (std::size_t peer = 0; peer < all.size(); ++peer) {
      std::map<std::pair<std::int64_t, std::string>, int> times;
      for (std::size_t i = 0; i < all[peer].size(); ++i) {
        const Entry& entry = all[peer][i];
        const int time = times[{entry.place, entry.name}]++;
        const auto [known, is_new] =
            holders.try_emplace({entry.place, entry.name, time}, Holder{peer, i});
        const Holder& holder = known->second;
        const Entry& first = all[holder.peer][holder.index];
        if (is_new || !differ(first, entry)) {
          continue;
        }
        const std::array<std::size_t, 4> order{
            holder.index, holder.peer, dims_between(entry.name, holder.peer, peer).size(), peer};
        if (!found || order < best) {
          best = order;
          found = {holder.peer, peer, entry.name, first.hash == 0, entry.hash == 0};
        }
      }
    }
    return found;
  }

  const CopiedTensor* find(const std::string& name) const {
    const auto found = std::ranges::find(tensors_, name, &CopiedTensor::name);
    return found == tensors_.end() ? nullptr : &*found;
  }

  DeviceMesh root_of(const std::string& name) const {
    const CopiedTensor* tensor = find(name);
    return tensor == nullptr ? check_.root : root_of(*tensor, check_);
  }

  std::vector<std::string> dims_between(const std::string& name, std::size_t a,
                                        std::size_t b) const {
    const DeviceMesh root = root_of(name);
    std::vector<std::string> dims;
    if (!root) {
      return dims;
    }
    const auto coordinate = [&](std::size_t peer) {
      const auto at = std::ranges::find(root.ranks(), peers_.ranks[peer]) - root.ranks().begin();
      return root.shape().coordinate(at);
    };
    const auto from = coordinate(a), to = coordinate(b);
    for (std::size_t d = 0; d < from.size(); ++d) {
      if (from[d] != to[d]) {
        dims.push_back(root.shape().names().empty() ? std::to_string(d) : root.shape().names()[d]);
      }
    }
    return dims;
  }

  std::string remedy(const CopiedTensor* tensor, const std::vector<std::string>& dims) const {
    const std::string distinct =
        ", or, if each rank has a parameter of its own (experts), call "
        "ParameterSlot::set_distinct_along()";
    if (tensor != nullptr && tensor->same_for_all_parts) {
      return "the optimizer has updated the parts of this parameter a different number of times: "
             "update a parameter on all ranks that have a part of the parameter, or on no rank";
    }
    if (tensor == nullptr || !is_distributed(tensor->slot->persistent())) {
      return "the parameter is plain, and no call sums its gradient over the ranks: give its "
             "module to fsdp::fully_shard, fsdp::replicate or parallelize_module, sum the gradient "
             "before the step" +
             distinct;
    }
    return fmt::format(
        "no call sums its gradient over the mesh dimensions [{}]: call fsdp::fully_shard, "
        "fsdp::replicate or parallelize_module with a mesh that has these dimensions, or give "
        "those ranks the same batch{}",
        fmt::join(dims, ", "), distinct);
  }

  [[noreturn]] void refuse(const Difference& found) const {
    const std::vector<std::string> dims = dims_between(found.name, found.first, found.other);
    const std::string along = dims.empty() ? ""
                                           : fmt::format(" along {} of {}", fmt::join(dims, ", "),
                                                         to_string(root_of(found.name)));
    const int first = peers_.ranks[found.first], other = peers_.ranks[found.other];
    const std::string none = found.none_on_first   ? fmt::format(" (rank {} has none)", first)
                             : found.none_on_other ? fmt::format(" (rank {} has none)", other)
                                                   : "";
    fail(check_.what, ": ", found.name, " differs between ranks ", first, " and ", other, along,
         none, ", but must be equal; ", remedy(find(found.name), dims));
  }

  const Peers& peers_;
  const std::vector<CopiedTensor>& tensors_;
  const CopyCheck& check_;
  std::vector<Entry> entries_;
  std::vector<const CopiedTensor*> sources_;
};

}  // namespace

std::vector<bool> dims_in_root(const DeviceMesh& mesh) {
  const DeviceMesh root = mesh.root();
  std::vector<bool> differs(static_cast<std::size_t>(root.ndim()), false);
  const std::vector<std::string>& of_root = root.shape().names();
  const std::vector<std::string>& own = mesh.shape().names();
  const auto is_of_root = [&](const std::string& name) {
    return std::ranges::find(of_root, name) != of_root.end();
  };
  if (!own.empty() && std::ranges::all_of(own, is_of_root)) {
    for (const std::string& name : own) {
      differs[static_cast<std::size_t>(root.shape().dim(name))] = mesh.size(name) > 1;
    }
    return differs;
  }
  // For a mesh made by flatten() or unflatten(): compares its ranks' coordinates in the root mesh.
  const std::vector<int>& all = root.ranks();
  std::vector<std::int64_t> first;
  for (const int rank : mesh.ranks()) {
    const auto guess = static_cast<std::size_t>(rank);
    const auto at = guess < all.size() && all[guess] == rank
                        ? static_cast<std::ptrdiff_t>(rank)
                        : std::ranges::find(all, rank) - all.begin();
    const std::vector<std::int64_t> coordinate = root.shape().coordinate(at);
    if (first.empty()) {
      first = coordinate;
    }
    for (std::size_t d = 0; d < first.size(); ++d) {
      differs[d] = differs[d] || coordinate[d] != first[d];
    }
  }
  return differs;
}

void check_copies(const Peers& peers, const std::vector<CopiedTensor>& tensors,
                  const CopyCheck& check) {
  if (peers.group->size() == 1) {
    return;
  }
  const comm::CallerScope caller("check_copies");
  tessera::flush_pending_transfers(*peers.group);
  Comparison(peers, tensors, check).run();
}

}  // namespace tessera::nn::detail
