// What parts become by operators: their dimensions and digits alone, nothing of autograd's nodes.

#include "random/part_operations.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

namespace tessera::detail {
namespace {

using PartDigit = LocalPart::Digit;
using Dim = LocalPart::Dim;

std::int64_t size_of(const Dim& dim) {
  std::int64_t size = 1;
  for (const PartDigit& digit : dim) {
    size *= digit.local;
  }
  return size;
}

Dim whole_dim(std::int64_t size) {
  return {{size, size, 0}};
}

/// What a dimension of one may be, beside one position: the one head that a rank has of several.
enum class HeadOfOne {
  kNone,   ///< it is a batch
  kTaken,  ///< if it was a dimension of its own before; else it is a sequence of one
  kCut,    ///< also the front of a digit that holds the head's features
};

/// Takes from the front of `digits` what makes a dimension of `size`. nullopt: they don't divide
/// so.
std::optional<Dim> take(std::vector<PartDigit>& digits, std::int64_t size, HeadOfOne head) {
  Dim dim;
  std::int64_t left = size;
  if (left == 1 && head != HeadOfOne::kNone && !digits.empty() && digits.front().is_split() &&
      digits.front().local > 0) {
    PartDigit& digit = digits.front();
    const bool may_take = digit.local == 1 || head == HeadOfOne::kCut;
    if (may_take && digit.global % digit.local == 0 && digit.offset % digit.local == 0) {
      dim.push_back({1, digit.global / digit.local, digit.offset / digit.local});
      digit = {digit.local, digit.local, 0};
    }
    return dim;
  }
  while (left > 1) {
    if (digits.empty()) {
      return std::nullopt;
    }
    PartDigit& digit = digits.front();
    if (digit.local > 0 && left % digit.local == 0) {
      left /= digit.local;
      dim.push_back(digit);
      digits.erase(digits.begin());
      continue;
    }
    if (digit.local == 0) {  // a rank, or a micro-batch, without rows
      return std::nullopt;
    }
    const std::int64_t inner = digit.local / left;
    if (digit.local % left != 0 || digit.global % inner != 0 || digit.offset % inner != 0) {
      return std::nullopt;
    }
    dim.push_back({left, digit.global / inner, digit.offset / inner});
    digit = {inner, inner, 0};
    left = 1;
  }
  return dim;
}

std::size_t wrapped(std::int64_t dim, std::size_t dims) {
  return static_cast<std::size_t>(counted_from_front(dim, static_cast<std::int64_t>(dims)));
}

}  // namespace

LocalPart LocalPart::whole(c10::IntArrayRef sizes) {
  LocalPart part;
  std::ranges::transform(sizes, std::back_inserter(part.dims), whole_dim);
  return part;
}

bool LocalPart::is_whole() const {
  return unknown.empty() &&
         std::ranges::none_of(dims, [](const Dim& dim) { return is_split_dim(dim); });
}

bool is_split_dim(const LocalPart::Dim& dim) {
  return std::ranges::any_of(dim, &PartDigit::is_split);
}

bool is_in_order(const LocalPart::Dim& dim) {
  const auto first = std::ranges::find_if(
      dim, [](const PartDigit& digit) { return digit.is_split() || digit.local != 1; });
  return first != dim.end() && first->is_split() && !is_split_dim(Dim(first + 1, dim.end()));
}

bool has_whole_parts(const LocalPart::Dim& dim, std::int64_t begin, std::int64_t length) {
  if (!is_split_dim(dim) || dim.front().is_split()) {
    return false;
  }
  const std::int64_t share = size_of(Dim(dim.begin() + 1, dim.end()));
  return share > 0 && length == share && begin % share == 0;
}

namespace parts {

LocalPart unknown(std::string why) {
  return {.unknown = std::move(why)};
}

// Views.

LocalPart viewed(const LocalPart& part, const std::vector<std::int64_t>& sizes) {
  std::vector<PartDigit> digits;
  for (const Dim& dim : part.dims) {
    std::ranges::copy_if(dim, std::back_inserter(digits), [](const PartDigit& digit) {
      return digit.local != 1 || digit.is_split();
    });
  }
  LocalPart result;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    // Features become heads in the last dimension but one, or before groups of heads.
    const bool of_features = d + (sizes.size() < 5 ? 2 : 3) >= sizes.size();
    const HeadOfOne head = d == 0        ? HeadOfOne::kNone
                           : of_features ? HeadOfOne::kCut
                                         : HeadOfOne::kTaken;
    std::optional<Dim> dim = take(digits, sizes[d], head);
    if (!dim) {
      return unknown("a view that cuts a part across");
    }
    // The one head that a rank has, folded with the batch in front of it, as for products of
    // matrices. Elsewhere it is the first of the next dimension, as where heads are repeated.
    const bool of_matrices = d == 0 && sizes.size() == 3 && sizes[1] != 1;
    const bool folded = of_matrices || d + 1 == sizes.size();
    while (folded && !digits.empty() && digits.front().local == 1) {
      dim->push_back(digits.front());
      digits.erase(digits.begin());
    }
    result.dims.push_back(std::move(*dim));
  }
  return result;
}

LocalPart transposed(LocalPart part, std::int64_t first, std::int64_t second) {
  std::swap(part.dims[wrapped(first, part.dims.size())],
            part.dims[wrapped(second, part.dims.size())]);
  return part;
}

LocalPart permuted(const LocalPart& part, const std::vector<std::int64_t>& dims) {
  LocalPart result;
  for (const std::int64_t dim : dims) {
    result.dims.push_back(part.dims[wrapped(dim, part.dims.size())]);
  }
  return result;
}

LocalPart unsqueezed(LocalPart part, std::int64_t dim) {
  part.dims.insert(
      part.dims.begin() + static_cast<std::ptrdiff_t>(wrapped(dim, part.dims.size() + 1)), Dim{});
  return part;
}

// What computes.

LocalPart aligned(const std::vector<LocalPart>& parts, const std::vector<std::int64_t>& sizes) {
  LocalPart result = LocalPart::whole(sizes);
  for (const LocalPart& part : parts) {
    if (part.dims.size() > sizes.size()) {
      return unknown("an operator on more dimensions");
    }
    const std::size_t behind = sizes.size() - part.dims.size();
    for (std::size_t d = 0; d < part.dims.size(); ++d) {
      if (!is_split_dim(part.dims[d])) {
        continue;
      }
      if (size_of(part.dims[d]) != sizes[behind + d]) {
        return unknown("an operator along what is split");
      }
      Dim& dim = result.dims[behind + d];
      if (is_split_dim(dim) && is_in_order(dim) != is_in_order(part.dims[d])) {
        return unknown("parts in two orders");
      }
      dim = part.dims[d];
    }
  }
  return result;
}

LocalPart multiplied(const LocalPart& a, const LocalPart& b,
                     const std::vector<std::int64_t>& sizes) {
  const std::size_t dims = sizes.size();
  if (a.dims.size() != dims || b.dims.size() != dims || is_split_dim(a.dims[dims - 1]) ||
      is_split_dim(b.dims[dims - 2])) {
    return unknown("a product along what is split");
  }
  std::vector<LocalPart> parts{a, b};
  parts[0].dims[dims - 1] = whole_dim(sizes[dims - 1]);
  parts[1].dims[dims - 2] = whole_dim(sizes[dims - 2]);
  return aligned(parts, sizes);
}

LocalPart reduced(LocalPart part, const std::vector<ReadDim>& reads,
                  const std::vector<std::int64_t>& sizes) {
  const bool keeps = part.dims.size() == sizes.size();
  std::vector<bool> gone(part.dims.size());
  for (const ReadDim& read : reads) {
    if (read.dim == ReadDim::kAll) {
      gone.assign(gone.size(), true);
    } else {
      gone[wrapped(read.dim, gone.size())] = true;
    }
  }
  LocalPart result{.piece = part.piece};
  for (std::size_t d = 0; d < gone.size(); ++d) {
    if (gone[d] && is_split_dim(part.dims[d])) {
      return unknown("a reduction of what is split");
    }
    if (!gone[d] || keeps) {
      result.dims.push_back(gone[d] ? whole_dim(1) : part.dims[d]);
    }
  }
  return result;
}

bool reads_split(const std::vector<LocalPart>& arguments, const std::vector<ReadDim>& reads) {
  return std::ranges::any_of(reads, [&](const ReadDim& read) {
    const std::vector<Dim>& dims = arguments.at(read.argument).dims;
    if (dims.empty()) {
      return false;
    }
    return read.dim == ReadDim::kAll ? std::ranges::any_of(dims, is_split_dim)
                                     : is_split_dim(dims[wrapped(read.dim, dims.size())]);
  });
}

// What repeats.

LocalPart expanded(LocalPart part, const std::vector<std::int64_t>& sizes) {
  const std::size_t front = sizes.size() - part.dims.size();
  for (std::size_t d = 0; d < part.dims.size(); ++d) {
    // The one head that a rank has, for each of several.
    if (is_split_dim(part.dims[d]) && size_of(part.dims[d]) == 1 && sizes[front + d] != 1) {
      part.dims[d].push_back(whole_dim(sizes[front + d]).front());
    }
  }
  return aligned({std::move(part)}, sizes);
}

LocalPart repeated(LocalPart part, const std::vector<std::int64_t>& repeats) {
  part.dims.insert(part.dims.begin(), repeats.size() - part.dims.size(), Dim{});
  for (std::size_t d = 0; d < repeats.size(); ++d) {
    if (repeats[d] != 1) {
      part.dims[d].insert(part.dims[d].begin(), whole_dim(repeats[d]).front());
    }
  }
  return part;
}

LocalPart selected(LocalPart part, std::int64_t dim, const std::vector<std::int64_t>& sizes) {
  const std::size_t d = wrapped(dim, sizes.size());
  if (!is_split_dim(part.dims[d])) {
    part.dims[d] = whole_dim(sizes[d]);
  } else if (const std::int64_t size = size_of(part.dims[d]); size > 0 && sizes[d] % size == 0) {
    part.dims[d].push_back(whole_dim(sizes[d] / size).front());
  } else {
    return unknown("a selection of what is split");
  }
  return part;
}

// What cuts, and what puts together.

LocalPart strided(LocalPart part, std::int64_t dim, std::int64_t step,
                  const std::vector<std::int64_t>& sizes) {
  const std::size_t d = wrapped(dim, sizes.size());
  Dim& digits = part.dims[d];
  if (!is_split_dim(digits)) {
    digits = whole_dim(sizes[d]);
    return part;
  }
  PartDigit& last = digits.back();
  if (last.local % step != 0 || last.global % step != 0 || last.offset % step != 0 ||
      size_of(digits) != sizes[d] * step) {
    return unknown("every few positions of what is split");
  }
  last = {last.local / step, last.global / step, last.offset / step};
  return part;
}

LocalPart cut(LocalPart part, const Piece& piece, LocalParts::Pieces pieces) {
  const std::size_t d = wrapped(piece.dim, part.dims.size());
  Dim& dim = part.dims[d];
  if (has_whole_parts(dim, piece.begin, piece.length)) {
    dim.erase(dim.begin());
  } else if (is_split_dim(dim)) {
    const std::int64_t size = size_of(dim);
    if (pieces == LocalParts::Pieces::kUnknown || !part.piece.empty() || piece.length == 0 ||
        size % piece.length != 0) {
      return unknown("a piece of what is split");
    }
    const std::optional<Dim> outer = take(dim, size / piece.length, HeadOfOne::kCut);
    if (!outer || is_split_dim(dim)) {
      return unknown("a piece of what is split");
    }
    part.piece = *outer;
  } else {
    dim = whole_dim(piece.length);
  }
  if (piece.removes_dim) {
    part.dims.erase(part.dims.begin() + static_cast<std::ptrdiff_t>(d));
  }
  return part;
}

namespace {

bool are_alike(const std::vector<LocalPart>& arguments) {
  const LocalPart& first = arguments.front();
  return std::ranges::all_of(arguments, [&](const LocalPart& part) {
    return part.dims.size() == first.dims.size() && size_of(part.piece) == size_of(first.piece) &&
           part.piece.empty() == first.piece.empty();
  });
}

/// The dimension along which shares of equal size were put together, as those of a fused weight's
/// parts are.
std::optional<Dim> of_shares(const std::vector<LocalPart>& shares, std::size_t d) {
  const Dim& first = shares.front().dims[d];
  const bool equal = std::ranges::all_of(shares, [&](const LocalPart& part) {
    return is_in_order(part.dims[d]) && size_of(part.dims[d]) == size_of(first);
  });
  if (!equal) {
    return std::nullopt;
  }
  Dim dim = whole_dim(std::ssize(shares));
  dim.insert(dim.end(), first.begin(), first.end());
  return dim;
}

}  // namespace

LocalPart put_together(const std::vector<LocalPart>& arguments, const PutTogether& how,
                       const std::vector<std::int64_t>& sizes) {
  std::vector<LocalPart> known;  // the others need no gradient
  std::ranges::copy_if(arguments, std::back_inserter(known),
                       [](const LocalPart& part) { return !part.dims.empty(); });
  LocalPart result = known.front();
  const std::size_t d = wrapped(how.dim, sizes.size());
  const Dim pieces = std::exchange(result.piece, {});
  if (!are_alike(known) || (!pieces.empty() && size_of(pieces) != std::ssize(arguments))) {
    return unknown("some pieces put together");
  }
  if (how.adds_dim) {
    result.dims.insert(result.dims.begin() + static_cast<std::ptrdiff_t>(d),
                       pieces.empty() ? whole_dim(sizes[d]) : pieces);
  } else if (!pieces.empty()) {
    result.dims[d].insert(result.dims[d].begin(), pieces.begin(), pieces.end());
  } else if (std::ranges::none_of(known, [&](const auto& x) { return is_split_dim(x.dims[d]); })) {
    result.dims[d] = whole_dim(sizes[d]);
  } else if (auto dim = of_shares(known, d); dim && known.size() == arguments.size()) {
    result.dims[d] = *std::move(dim);
  } else {
    return unknown("parts put together");
  }
  return result;
}

}  // namespace parts
}  // namespace tessera::detail
