#include <range/v3/view/enumerate.hpp>
#include <range/v3/view/reverse.hpp>
#include <range/v3/view/zip.hpp>

#include <algorithm>
#include <array>
#include <cctype>
#include <optional>
#include <ostream>
#include <regex>
#include <utility>

#include "layout/digits.h"
#include "tessera/core/detail/layout.h"
#include "tessera/core/error.h"
#include "tessera/core/placement.h"

namespace tessera {

// Converts placements to text and back, in PyTorch's notation. The text can be pasted into Python.
// Documents, messages and the command line use this notation.

namespace {

constexpr std::array<std::pair<std::string_view, ReduceOp>, 5> kReduceOps{{
    {"sum", ReduceOp::kSum},
    {"avg", ReduceOp::kAvg},
    {"max", ReduceOp::kMax},
    {"min", ReduceOp::kMin},
    {"product", ReduceOp::kProduct},
}};

struct Printer {
  std::string operator()(const Replicate&) const { return "Replicate()"; }
  std::string operator()(const Shard& s) const { return detail::concat("Shard(", s.dim, ")"); }
  std::string operator()(const Partial& p) const {
    return detail::concat("Partial(", to_string(p.op), ")");
  }
  std::string operator()(const StridedShard& s) const {
    return detail::concat("_StridedShard(dim=", s.dim, ", sf=", s.split_factor, ")");
  }
};

/// Parses a placement without spaces. Returns nullopt for text that is no placement. "Partial()"
/// means a sum, as in PyTorch. Both "sf=" (printed by PyTorch) and "split_factor=" are accepted.
std::optional<Placement> parse(const std::string& text) {
  static const std::regex kShard(R"((?:Shard|S)\((?:dim=)?(-?\d{1,18})\))");
  static const std::regex kStridedShard(
      R"(_StridedShard\((?:dim=)?(-?\d{1,18}),(?:split_factor=)?(?:sf=)?(\d{1,18})\))");
  static const std::regex kPartial(R"(P|(?:Partial|P)\((\w*)\))");
  std::smatch parts;
  if (text == "R" || text == "Replicate()") {
    return Replicate{};
  }
  if (std::regex_match(text, parts, kShard)) {
    return Shard{std::stoll(parts[1])};
  }
  if (std::regex_match(text, parts, kStridedShard) && std::stoll(parts[2]) >= 1) {
    return StridedShard{std::stoll(parts[1]), std::stoll(parts[2])};
  }
  if (std::regex_match(text, parts, kPartial)) {
    const std::string name = parts[1].length() == 0 ? "sum" : parts[1].str();
    for (const auto& [op_name, op] : kReduceOps) {
      if (name == op_name) {
        return Partial{op};
      }
    }
  }
  return std::nullopt;
}

}  // namespace

/// Sums and averages commute with each other. No other two different reductions commute.
bool commute(ReduceOp a, ReduceOp b) {
  const auto is_linear = [](ReduceOp op) { return op == ReduceOp::kSum || op == ReduceOp::kAvg; };
  return a == b || (is_linear(a) && is_linear(b));
}

std::string to_string(ReduceOp op) {
  for (const auto& [name, value] : kReduceOps) {
    if (value == op) {
      return std::string(name);
    }
  }
  fail("to_string: ", static_cast<int>(op), " is not a ReduceOp");
}

std::string to_string(const Placement& placement) {
  return std::visit(Printer{}, placement);
}

std::string to_string(const Placements& placements) {
  std::string out = "[";
  for (std::size_t i = 0; i < placements.size(); ++i) {
    out += (i == 0 ? "" : ", ") + to_string(placements[i]);
  }
  return out + "]";
}

std::ostream& operator<<(std::ostream& stream, ReduceOp op) {
  return stream << to_string(op);
}

std::ostream& operator<<(std::ostream& stream, const Placement& placement) {
  return stream << to_string(placement);
}

std::ostream& operator<<(std::ostream& stream, const Placements& placements) {
  return stream << to_string(placements);
}

Placement parse_placement(std::string_view text) {
  // The parser of placements ignores spaces. PyTorch prints a space after each comma.
  std::string packed(text);
  std::erase_if(packed, [](unsigned char c) { return std::isspace(c) != 0; });
  const auto placement = parse(packed);
  TESSERA_CHECK(placement, "placement \"", text,
                "\" is not understood; write Shard(0), Replicate(), Partial(sum|avg|max|min|"
                "product) or _StridedShard(dim=0, sf=2)");
  return *placement;
}

// Placements <-> Layout. NOTE [Orders and strided shards]
//
// In PyTorch's list of placements, mesh dimensions divide a tensor dimension in mesh order. A mesh
// dimension that divides after a later mesh dimension has a StridedShard. The split factor is the
// number of chunks of the later mesh dimension. Example: FSDP over tensor parallelism on mesh
// (dp=2, tp=4) divides over tp first. PyTorch writes [_StridedShard(0, sf=4), Shard(0)].
//
// From placements to a layout: pure_order() inserts the mesh dimensions into an order, from the
// last to the first. The product of the preceding sizes must equal the split factor.
//
// If no order fits, the mesh dimension divides each of `split_factor` contiguous blocks of the
// tensor dimension (a flattened view, a fused weight). DigitCutter then splits the tensor dimension
// evenly into Digits (see Layout).

namespace {

using detail::mesh_size;
using Sizes = std::vector<std::int64_t>;

/// How one mesh dimension divides a tensor dimension. A Shard has split factor 1.
struct Cut {
  int mesh_dim = 0;
  std::int64_t split_factor = 1;
};

/// Returns the order in which the mesh dimensions divide, or nullopt if no order explains all split
/// factors. See NOTE [Orders and strided shards].
std::optional<std::vector<int>> pure_order(const Sizes& mesh, const std::vector<Cut>& cuts) {
  std::vector<int> order;
  for (const Cut& cut : cuts | ranges::views::reverse) {
    std::int64_t in_front = 1;
    auto at = order.begin();
    while (at != order.end() && in_front < cut.split_factor) {
      in_front *= mesh_size(mesh, *at++);
    }
    if (in_front != cut.split_factor) {
      return std::nullopt;
    }
    order.insert(at, cut.mesh_dim);
  }
  return order;
}

/// A DigitCutter applies the divisions (Cut) of one tensor dimension in mesh order, and stores the
/// Digits (sub-dimensions) of the tensor dimension that result from each division.
class DigitCutter {
 public:
  DigitCutter(const Sizes& mesh, std::int64_t size) : mesh_(mesh), digits_{Digit{size, {}}} {}

  /// Shards a Digit (sub-dimension) as described by `cut`. Returns false if no Digit fits `cut`.
  bool apply(const Cut& cut) {
    const auto first = skip(cut.split_factor);
    if (!first) {
      return false;
    }
    for (auto i = *first; i < digits_.size(); ++i) {
      auto& digit = digits_[i];
      const bool last = i + 1 == digits_.size();  // only the last Digit can be divided unevenly
      const auto left = remaining(digit);
      if (!last && left == 1) {
        continue;
      }
      if (!last && (!left || *left % mesh_size(mesh_, cut.mesh_dim) != 0)) {
        return false;
      }
      digit.mesh_dims.push_back(cut.mesh_dim);
      return true;
    }
    return false;
  }

  std::vector<Digit> digits() && { return std::move(digits_); }

 private:
  /// Returns the number of positions of a Digit (sub-dimension) on each rank. Returns nullopt if
  /// the number differs between ranks, because the next division would then differ between ranks.
  std::optional<std::int64_t> remaining(const Digit& digit) const {
    const auto parts = detail::mesh_product(mesh_, digit.mesh_dims);
    if (digit.extent % parts != 0) {
      return std::nullopt;
    }
    return digit.extent / parts;
  }

  /// Returns an index i. The local sizes of the Digits (sub-dimensions) before index i have the
  /// product `factor`. Splits a Digit in two if necessary.
  std::optional<std::size_t> skip(std::int64_t factor) {
    for (std::size_t i = 0; i < digits_.size(); ++i) {
      if (factor == 1) {
        return i;
      }
      const auto left = remaining(digits_[i]);
      if (!left || *left == 0) {
        return std::nullopt;
      }
      if (*left % factor == 0 && *left != factor) {
        const auto behind = *left / factor;
        digits_[i].extent /= behind;
        digits_.insert(digits_.begin() + static_cast<std::ptrdiff_t>(i) + 1, Digit{behind, {}});
        return i + 1;
      }
      if (factor % *left != 0) {
        return std::nullopt;
      }
      factor /= *left;
    }
    if (factor != 1) {
      return std::nullopt;
    }
    // All Digits (sub-dimensions) are skipped, so nothing is left to divide. The mesh dimension
    // gets a new Digit of one position, which only the rank at coordinate 0 gets.
    digits_.push_back(Digit{1, {}});
    return digits_.size() - 1;
  }

  const Sizes& mesh_;
  std::vector<Digit> digits_;
};

/// Returns the Digits (sub-dimensions) of a tensor dimension of size `size`. Prefers a single Digit
/// with the order of pure_order(), because such a Digit is valid for any size.
std::optional<std::vector<Digit>> to_digits(const Sizes& mesh, const std::vector<Cut>& cuts,
                                            std::int64_t size) {
  if (cuts.empty()) {
    return std::vector<Digit>{};
  }
  if (auto order = pure_order(mesh, cuts)) {
    return std::vector<Digit>{Digit{0, std::move(*order)}};
  }
  DigitCutter cutter(mesh, size);
  for (const auto& cut : cuts) {
    if (!cutter.apply(cut)) {
      return std::nullopt;
    }
  }
  return std::move(cutter).digits();
}

/// For each tensor dimension the divisions (Cut) in mesh order, and the partial mesh dimensions.
struct CutsAndPartials {
  std::vector<std::vector<Cut>> cuts;
  std::vector<PartialDim> partial;
};

std::size_t tensor_dim(const Placements& placements, std::int64_t dim, std::int64_t ndim) {
  TESSERA_CHECK(dim >= -ndim && dim < ndim, "placements ", to_string(placements),
                " shard dimension ", dim, " of a tensor with ", ndim,
                " dimensions; shard an existing dimension, or use Replicate()");
  return static_cast<std::size_t>(dim < 0 ? dim + ndim : dim);
}

CutsAndPartials cuts_of(const Placements& placements, std::size_t ndim) {
  CutsAndPartials out;
  out.cuts.resize(ndim);
  const auto cut = [&](std::int64_t dim, Cut how) {
    out.cuts[tensor_dim(placements, dim, static_cast<std::int64_t>(ndim))].push_back(how);
  };
  for (const auto& [i, placement] : ranges::views::enumerate(placements)) {
    const auto mesh_dim = static_cast<int>(i);
    if (const auto* shard = std::get_if<Shard>(&placement)) {
      cut(shard->dim, {mesh_dim, 1});
    } else if (const auto* strided = std::get_if<StridedShard>(&placement)) {
      TESSERA_CHECK(strided->split_factor >= 1, "placement ", to_string(placement),
                    " has a split factor below 1; pass 1 or more");
      cut(strided->dim, {mesh_dim, strided->split_factor});
    } else if (const auto* partial = std::get_if<Partial>(&placement)) {
      out.partial.push_back({mesh_dim, partial->op});
    }
  }
  return out;
}

/// Returns the split factor of `mesh_dim` (NOTE [Orders and strided shards]): the local sizes of
/// the preceding Digits, times the sizes of later mesh dimensions that divide first.
std::int64_t split_factor(const Sizes& mesh, const std::vector<Digit>& digits, int mesh_dim) {
  std::int64_t factor = 1;
  for (const auto& digit : digits) {
    const auto& order = digit.mesh_dims;
    const auto at = std::find(order.begin(), order.end(), mesh_dim);
    if (at == order.end()) {
      factor *= digit.extent;
      // Mesh dimensions before `mesh_dim` have already divided this Digit (sub-dimension), because
      // PyTorch applies placements in mesh order.
      for (const int m : order) {
        factor /= m < mesh_dim ? mesh_size(mesh, m) : 1;
      }
      continue;
    }
    for (auto m = order.begin(); m != at; ++m) {
      factor *= *m > mesh_dim ? mesh_size(mesh, *m) : 1;
    }
    break;
  }
  // If preceding Digits (sub-dimensions) are divided unevenly, the split factor can be 0. In this
  // case to_placements() throws Error.
  return std::max(factor, std::int64_t{1});
}

Placement placement_of(const Layout& layout, int mesh_dim) {
  if (const auto* partial = layout.partial_on(mesh_dim)) {
    return Partial{partial->op};
  }
  const int dim = layout.sharded_dim(mesh_dim);
  if (dim < 0) {
    return Replicate{};
  }
  const auto factor = split_factor(layout.mesh_sizes(), layout.digits(dim), mesh_dim);
  if (factor == 1) {
    return Shard{dim};
  }
  return StridedShard{dim, factor};
}

/// Whether a tensor dimension of a layout has several Digits (sub-dimensions). A layout without
/// such a dimension has an equivalent list of placements.
bool has_several_digits(const Layout& layout) {
  return std::any_of(layout.dims().begin(), layout.dims().end(),
                     [](const auto& digits) { return digits.size() > 1; });
}

/// Converts placements to a layout. Returns nullptr if the StridedShards of a tensor dimension do
/// not align with its other shards.
LayoutPtr try_to_layout(const Sizes& mesh_sizes, const Placements& placements,
                        std::span<const std::int64_t> sizes) {
  auto [cuts, partial] = cuts_of(placements, sizes.size());
  Layout::Dims dims;
  for (const auto& [dim_cuts, size] : ranges::views::zip(cuts, sizes)) {
    auto digits = to_digits(mesh_sizes, dim_cuts, size);
    if (!digits) {
      return nullptr;
    }
    dims.push_back(std::move(*digits));
  }
  return Layout::intern(mesh_sizes, std::move(dims), std::move(partial));
}

}  // namespace

LayoutPtr to_layout(const Sizes& mesh_sizes, const Placements& placements,
                    std::span<const std::int64_t> sizes) {
  TESSERA_CHECK(placements.size() == mesh_sizes.size(), "placements ", to_string(placements),
                " have length ", placements.size(), " for a mesh of ", mesh_sizes.size(),
                " dimensions; pass one placement for each mesh dimension");
  auto layout = try_to_layout(mesh_sizes, placements, sizes);
  TESSERA_CHECK(layout, "placements ", to_string(placements),
                " split a tensor dimension at positions that don't line up; use split factors that "
                "divide the dimension, or Shard");
  return layout;
}

Placements to_placements(const Layout& layout, std::span<const std::int64_t> sizes) {
  detail::check_ndim(layout, sizes);
  Placements out;
  for (int m = 0; m < layout.mesh_ndim(); ++m) {
    out.push_back(placement_of(layout, m));
  }
  if (!has_several_digits(layout)) {
    return out;
  }
  // The placements are converted back and compared, because some layouts have no placements.
  const auto back = try_to_layout(layout.mesh_sizes(), out, sizes);
  TESSERA_CHECK(
      back && detail::without_unit_mesh_dims(back) == detail::without_unit_mesh_dims(layout.ptr()),
      "layout ", to_string(layout),
      " has no form as a list of placements, because a digit before the last is split unevenly");
  return out;
}

}  // namespace tessera
