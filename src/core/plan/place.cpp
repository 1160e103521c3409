#include "place.h"

#include <algorithm>
#include <utility>

#include "../canonical_digits.h"

namespace tessera::plan {
namespace {

bool contains(std::span<const int> list, int value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

/// `digits` with only the mesh dimensions in `present`; nullopt if one stands behind a missing one.
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

std::vector<int> with(std::vector<int> list, std::span<const int> more) {
  list.insert(list.end(), more.begin(), more.end());
  return list;
}

void drop(std::vector<PartialDim>& partial, std::span<const int> mesh_dims) {
  std::erase_if(partial, [&](const auto& p) { return contains(mesh_dims, p.mesh_dim); });
}

}  // namespace

Place::Place(const Problem& problem, LayoutPtr at)
    : problem_(problem),
      at_(at),
      settled_(static_cast<std::size_t>(at->mesh_ndim()), false),
      complete_(static_cast<std::size_t>(at->tensor_ndim()), true) {
  for (int d = 0; d < at->tensor_ndim(); ++d) settle(d);
}

void Place::settle(int dim) {
  const auto& here = at_->digits(dim);
  if (here.empty()) return;
  const auto& there = problem_.to->digits(dim);
  const auto present = at_->mesh_dims_of(dim);
  std::size_t settled = 0;
  if (here.size() > 1 || there.size() > 1) {
    if (fits_several_digits(dim, present)) settled = present.size();
  } else if (!there.empty()) {
    const auto& order = there[0].mesh_dims;
    while (settled < std::min(present.size(), order.size()) && present[settled] == order[settled]) {
      ++settled;
    }
  }
  for (std::size_t i = 0; i < settled; ++i) settled_[static_cast<std::size_t>(present[i])] = true;
  complete_[static_cast<std::size_t>(dim)] = settled == present.size();
}

bool Place::fits_several_digits(int dim, const std::vector<int>& present) const {
  const auto& there = problem_.to->digits(dim);
  if (there.size() <= 1) return false;
  const auto part = restricted(there, present);
  return part && detail::canonical_digits(at_->mesh_sizes(), *part) == at_->digits(dim);
}

bool Place::is_replicated_on(int mesh_dim) const {
  return at_->sharded_dim(mesh_dim) < 0 && at_->partial_on(mesh_dim) == nullptr;
}

bool Place::is_group(int dim, const Digits& digits, std::span<const int> mesh_dims) const {
  if (mesh_dims.size() == 1) return true;
  const auto digit = std::find_if(digits.begin(), digits.end(), [&](const Digit& d) {
    return contains(d.mesh_dims, mesh_dims.front());
  });
  const auto& order = digit->mesh_dims;
  if (order.size() < mesh_dims.size() ||
      !std::equal(mesh_dims.rbegin(), mesh_dims.rend(), order.rbegin())) {
    return false;
  }
  const auto extent = digit->extent == 0 ? problem_.size(dim) : digit->extent;
  return extent % detail::mesh_product(at_->mesh_sizes(), order) == 0;
}

std::vector<Tail> Place::tails() const {
  std::vector<Tail> out;
  for (int d = 0; d < at_->tensor_ndim(); ++d) {
    const auto& digits = at_->digits(d);
    for (std::size_t g = 0; g < digits.size(); ++g) {
      const auto& order = digits[g].mesh_dims;
      for (auto first = order.rbegin(); first != order.rend() && !is_settled(*first); ++first) {
        Tail tail{d, g, std::vector<int>(std::prev(first.base()), order.end())};
        if (!is_group(d, digits, tail.mesh_dims)) break;
        out.push_back(std::move(tail));
      }
    }
  }
  return out;
}

std::vector<std::vector<int>> Place::reducible() const {
  const auto& partial = at_->partial();
  std::vector<std::vector<int>> out;
  for (unsigned set = 1; set < 1U << partial.size(); ++set) {
    std::vector<int> dims;
    bool legal = true;
    const PartialDim* outermost = nullptr;
    for (std::size_t i = 0; i < partial.size(); ++i) {
      if ((set >> i & 1U) != 0) {
        if (outermost == nullptr) outermost = &partial[i];
        legal = legal && partial[i].op == outermost->op;
        dims.push_back(partial[i].mesh_dim);
      } else if (outermost != nullptr) {  // stays, and is inner to one that is to be reduced
        legal = legal && commute(partial[i].op, outermost->op);
      }
    }
    if (legal) out.push_back(std::move(dims));
  }
  return out;
}

std::vector<int> Place::in_final_order(std::vector<int> mesh_dims) const {
  const int dim = problem_.to->sharded_dim(mesh_dims.front());
  if (dim < 0) return mesh_dims;
  const auto order = problem_.to->mesh_dims_of(dim);
  std::stable_sort(mesh_dims.begin(), mesh_dims.end(), [&](int a, int b) {
    return std::find(order.begin(), order.end(), a) < std::find(order.begin(), order.end(), b);
  });
  return mesh_dims;
}

std::optional<Landing> Place::final_landing(std::span<const int> mesh_dims) const {
  const int dim = problem_.to->sharded_dim(mesh_dims.front());
  if (dim < 0 || !is_settled_dim(dim)) return std::nullopt;
  const auto& there = problem_.to->digits(dim);
  const auto after = with(at_->mesh_dims_of(dim), mesh_dims);
  const auto all_there = problem_.to->mesh_dims_of(dim);
  if (!std::all_of(mesh_dims.begin(), mesh_dims.end(),
                   [&](int m) { return contains(all_there, m); })) {
    return std::nullopt;
  }
  auto digits = restricted(there, after);
  if (!digits || !is_group(dim, *digits, mesh_dims)) return std::nullopt;
  return Landing{dim, std::move(*digits)};
}

std::vector<Landing> Place::landings(std::span<const int> mesh_dims) const {
  std::vector<Landing> out;
  if (auto landing = final_landing(mesh_dims)) out.push_back(std::move(*landing));
  for (const int dim : problem_.parking) {
    auto digits = at_->digits(dim);
    const bool is_home = std::any_of(mesh_dims.begin(), mesh_dims.end(),
                                     [&](int m) { return problem_.to->sharded_dim(m) == dim; });
    if (digits.size() > 1 || is_home) continue;
    if (digits.empty()) digits.emplace_back();
    digits[0].mesh_dims = with(std::move(digits[0].mesh_dims), mesh_dims);
    if (is_group(dim, digits, mesh_dims)) out.push_back({dim, std::move(digits)});
  }
  return out;
}

LayoutPtr Place::without(const Tail& tail) const {
  auto dims = at_->dims();
  auto& order = dims[static_cast<std::size_t>(tail.dim)][tail.digit].mesh_dims;
  order.resize(order.size() - tail.mesh_dims.size());
  return Layout::intern(at_->mesh_sizes(), std::move(dims), at_->partial());
}

LayoutPtr Place::moved(const Tail& tail, const Landing& landing) const {
  auto dims = at_->dims();
  auto& order = dims[static_cast<std::size_t>(tail.dim)][tail.digit].mesh_dims;
  order.resize(order.size() - tail.mesh_dims.size());
  dims[static_cast<std::size_t>(landing.dim)] = landing.digits;
  return Layout::intern(at_->mesh_sizes(), std::move(dims), at_->partial());
}

LayoutPtr Place::landed(std::span<const int> mesh_dims, const Landing& landing) const {
  auto dims = at_->dims();
  auto partial = at_->partial();
  drop(partial, mesh_dims);
  dims[static_cast<std::size_t>(landing.dim)] = landing.digits;
  return Layout::intern(at_->mesh_sizes(), std::move(dims), std::move(partial));
}

LayoutPtr Place::reduced(std::span<const int> mesh_dims) const {
  auto partial = at_->partial();
  drop(partial, mesh_dims);
  return Layout::intern(at_->mesh_sizes(), at_->dims(), std::move(partial));
}

LayoutPtr Place::made_partial(PartialDim made) const {
  auto partial = at_->partial();
  partial.push_back(made);
  return Layout::intern(at_->mesh_sizes(), at_->dims(), std::move(partial));
}

}  // namespace tessera::plan
