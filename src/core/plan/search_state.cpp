// What may be done with one layout on the way to another. The rule behind all of it: mesh
// dimensions are put onto a digit and taken off it at its inner end only, as collectives can do
// just that.
#include "plan/search_state.h"

#include <algorithm>
#include <utility>

namespace tessera::plan {
namespace {

/// Lists of mesh dimensions have a handful of entries.
bool contains(std::span<const int> list, int value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

/// `digits` with only the mesh dimensions in `present`; nullopt if one of these is inner to one
/// that is not: it could only be put in front of it later, and mesh dimensions are appended.
std::optional<Digits> restricted(Digits digits, std::span<const int> present) {
  for (auto& digit : digits) {
    auto& dims = digit.mesh_dims;
    const auto end =
        std::find_if(dims.begin(), dims.end(), [&](int m) { return !contains(present, m); });
    if (std::any_of(end, dims.end(), [&](int m) { return contains(present, m); })) {
      return std::nullopt;
    }
    dims.erase(end, dims.end());
  }
  return digits;
}

/// Appends at the inner end.
std::vector<int> with(std::vector<int> list, std::span<const int> more) {
  list.insert(list.end(), more.begin(), more.end());
  return list;
}

/// A collective over a set reduces all of it at once.
void drop(std::vector<PartialDim>& partial, std::span<const int> mesh_dims) {
  std::erase_if(partial, [&](const auto& p) { return contains(mesh_dims, p.mesh_dim); });
}

}  // namespace

/// The problem must outlive the state. A tensor dimension that is not sharded counts as complete.
SearchState::SearchState(const Problem& problem, LayoutPtr layout)
    : problem_(problem),
      layout_(layout),
      settled_(static_cast<std::size_t>(layout->mesh_ndim()), false),
      complete_(static_cast<std::size_t>(layout->tensor_ndim()), true) {
  for (int d = 0; d < layout->tensor_ndim(); ++d) {
    settle(d);
  }
}

/// Finds the settled mesh dimensions of `dim`: the longest common prefix of its orders now and in
/// the target; with several digits all of them or none.
void SearchState::settle(int dim) {
  const auto& here = layout_->digits(dim);
  if (here.empty()) {
    return;
  }
  const auto& there = problem_.to->digits(dim);
  const auto present = layout_->mesh_dims_of(dim);
  std::size_t settled = 0;
  // With several digits a prefix of the order does not say which digit is cut: compare the digits
  // themselves.
  if (here.size() > 1 || there.size() > 1) {
    if (fits_several_digits(dim, present)) {
      settled = present.size();
    }
  } else if (!there.empty()) {
    const auto& order = there[0].mesh_dims;
    while (settled < std::min(present.size(), order.size()) && present[settled] == order[settled]) {
      ++settled;
    }
  }
  for (std::size_t i = 0; i < settled; ++i) {
    settled_[static_cast<std::size_t>(present[i])] = true;
  }
  complete_[static_cast<std::size_t>(dim)] = settled == present.size();
}

/// Whether the digits here are those of the target, less the mesh dimensions that are not here yet.
/// In canonical form, as the removal may make neighbours one.
bool SearchState::fits_several_digits(int dim, const std::vector<int>& present) const {
  const auto& there = problem_.to->digits(dim);
  if (there.size() <= 1) {
    return false;
  }
  const auto part = restricted(there, present);
  return part && detail::canonical_digits(layout_->mesh_sizes(), *part) == layout_->digits(dim);
}

/// Neither sharded nor partial: what a local step may act on.
bool SearchState::is_replicated_on(int mesh_dim) const {
  return layout_->sharded_dim(mesh_dim) < 0 && layout_->partial_on(mesh_dim) == nullptr;
}

/// Whether `mesh_dims` are the last ones of a digit, whose extent all of its mesh dimensions
/// divide. Only then does one flattened group cut it as the nested chunks of its mesh dimensions
/// do.
bool SearchState::is_group(int dim, const Digits& digits, std::span<const int> mesh_dims) const {
  if (mesh_dims.size() == 1) {
    return true;
  }
  const auto digit = std::find_if(digits.begin(), digits.end(), [&](const Digit& d) {
    return contains(d.mesh_dims, mesh_dims.front());
  });
  const auto& order = digit->mesh_dims;
  if (order.size() < mesh_dims.size() ||
      !std::equal(mesh_dims.rbegin(), mesh_dims.rend(), order.rbegin())) {
    return false;
  }
  // Uneven chunks of chunks lie elsewhere than the chunks of one cut: the parts would be of other
  // sizes.
  const auto extent = digit->extent == 0 ? problem_.size(dim) : digit->extent;
  return extent % detail::mesh_product(layout_->mesh_sizes(), order) == 0;
}

/// From the innermost one outwards, as long as they are not settled: longer tails are one
/// collective over a flattened group. Stops at the first that is not a group: then no longer one
/// is.
std::vector<Tail> SearchState::tails() const {
  std::vector<Tail> out;
  for (int d = 0; d < layout_->tensor_ndim(); ++d) {
    const auto& digits = layout_->digits(d);
    for (std::size_t g = 0; g < digits.size(); ++g) {
      const auto& order = digits[g].mesh_dims;
      for (auto first = order.rbegin(); first != order.rend() && !is_settled(*first); ++first) {
        Tail tail{d, g, std::vector<int>(std::prev(first.base()), order.end())};
        if (!is_group(d, digits, tail.mesh_dims)) {
          break;
        }
        out.push_back(std::move(tail));
      }
    }
  }
  return out;
}

/// Subsets are enumerated as bits: at most 2^n for n partial mesh dimensions; n is one or two.
/// Legal: one reduction for all, and partials further inside that stay commute with it, as inner
/// ones are reduced first.
std::vector<std::vector<int>> SearchState::reducible_sets() const {
  const auto& partial = layout_->partial();
  std::vector<std::vector<int>> out;
  for (unsigned set = 1; set < 1U << partial.size(); ++set) {  // each non-empty subset, as bits
    std::vector<int> dims;
    bool legal = true;
    const PartialDim* outermost = nullptr;
    for (std::size_t i = 0; i < partial.size(); ++i) {
      if ((set >> i & 1U) != 0) {
        if (outermost == nullptr) {
          outermost = &partial[i];
        }
        legal = legal && partial[i].op == outermost->op;
        dims.push_back(partial[i].mesh_dim);
      } else if (outermost != nullptr) {  // stays partial, inner to one that is to be reduced
        legal = legal && commute(partial[i].op, outermost->op);
      }
    }
    if (legal) {
      out.push_back(std::move(dims));
    }
  }
  return out;
}

/// The order decides which chunk each rank gets. What the target does not shard keeps its order;
/// what it has in another tensor dimension comes last.
std::vector<int> SearchState::in_final_order(std::vector<int> mesh_dims) const {
  const int dim = problem_.to->sharded_dim(mesh_dims.front());
  if (dim < 0) {
    return mesh_dims;
  }
  const auto order = problem_.to->mesh_dims_of(dim);
  std::stable_sort(mesh_dims.begin(), mesh_dims.end(), [&](int a, int b) {
    return std::find(order.begin(), order.end(), a) < std::find(order.begin(), order.end(), b);
  });
  return mesh_dims;
}

/// Not yet, if mesh dimensions that are there now would have to go first, or if others belong in
/// front of these.
std::optional<Destination> SearchState::final_destination(std::span<const int> mesh_dims) const {
  const int dim = problem_.to->sharded_dim(mesh_dims.front());
  if (dim < 0 || !is_settled_dim(dim)) {
    return std::nullopt;
  }
  const auto& there = problem_.to->digits(dim);
  const auto after = with(layout_->mesh_dims_of(dim), mesh_dims);
  const auto all_there = problem_.to->mesh_dims_of(dim);
  // A set may have several destinations in the target; then its parts go one by one.
  if (!std::all_of(mesh_dims.begin(), mesh_dims.end(),
                   [&](int m) { return contains(all_there, m); })) {
    return std::nullopt;
  }
  auto digits = restricted(there, after);
  if (!digits || !is_group(dim, *digits, mesh_dims)) {
    return std::nullopt;
  }
  return Destination{dim, std::move(*digits)};
}

/// The final one is first: of equal costs the planner takes what it found first.
std::vector<Destination> SearchState::destinations(std::span<const int> mesh_dims) const {
  std::vector<Destination> out;
  if (auto destination = final_destination(mesh_dims)) {
    out.push_back(std::move(*destination));
  }
  for (const int dim : problem_.temporary_dims) {
    auto digits = layout_->digits(dim);
    // Where one of them is to end up it would stand in the wrong place, or be there already.
    const bool is_final = std::any_of(mesh_dims.begin(), mesh_dims.end(),
                                      [&](int m) { return problem_.to->sharded_dim(m) == dim; });
    // Temporary places are simple ones only: to append to one of several digits depends on sizes.
    if (digits.size() > 1 || is_final) {
      continue;
    }
    if (digits.empty()) {
      digits.emplace_back();
    }
    digits[0].mesh_dims = with(std::move(digits[0].mesh_dims), mesh_dims);
    if (is_group(dim, digits, mesh_dims)) {
      out.push_back({dim, std::move(digits)});
    }
  }
  return out;
}

/// The cut is undone from its inner end; an empty order is canonicalised away.
Layout::Dims SearchState::without(const Tail& tail) const {
  auto dims = layout_->dims();
  auto& order = dims[static_cast<std::size_t>(tail.dim)][tail.digit].mesh_dims;
  order.resize(order.size() - tail.mesh_dims.size());
  return dims;
}

LayoutPtr SearchState::after_all_gather(const Tail& tail) const {
  return Layout::intern(layout_->mesh_sizes(), without(tail), layout_->partial());
}

/// The tail leaves one dimension and is in the digits of the other already.
LayoutPtr SearchState::after_all_to_all(const Tail& tail, const Destination& destination) const {
  Layout::Dims dims = without(tail);
  dims[static_cast<std::size_t>(destination.dim)] = destination.digits;
  return Layout::intern(layout_->mesh_sizes(), std::move(dims), layout_->partial());
}

/// `destination` holds the digits with the new mesh dimensions in them.
LayoutPtr SearchState::after_shard(std::span<const int> mesh_dims,
                                   const Destination& destination) const {
  auto dims = layout_->dims();
  auto partial = layout_->partial();
  drop(partial, mesh_dims);
  dims[static_cast<std::size_t>(destination.dim)] = destination.digits;
  return Layout::intern(layout_->mesh_sizes(), std::move(dims), std::move(partial));
}

LayoutPtr SearchState::after_all_reduce(std::span<const int> mesh_dims) const {
  auto partial = layout_->partial();
  drop(partial, mesh_dims);
  return Layout::intern(layout_->mesh_sizes(), layout_->dims(), std::move(partial));
}

LayoutPtr SearchState::after_make_partial(PartialDim made) const {
  auto partial = layout_->partial();
  partial.push_back(made);
  return Layout::intern(layout_->mesh_sizes(), layout_->dims(), std::move(partial));
}

}  // namespace tessera::plan
