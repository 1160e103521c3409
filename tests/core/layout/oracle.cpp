#include "oracle.h"

#include <algorithm>
#include <cctype>
#include <numeric>
#include <sstream>

namespace tessera::testing {
namespace {

Indices arange(std::int64_t size) {
  Indices out(static_cast<std::size_t>(size));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

Indices strided(const Indices& list, std::int64_t factor, std::int64_t parts, std::int64_t index) {
  Indices out;
  for (std::int64_t piece = 0; piece < factor; ++piece) {
    const auto part = chunk(chunk(list, factor, piece), parts, index);
    out.insert(out.end(), part.begin(), part.end());
  }
  return out;
}

std::vector<bool> held(const Layout& layout, const Digit& digit, std::int64_t extent,
                       const Indices& coordinate) {
  auto piece = arange(extent);
  for (const int m : digit.mesh_dims) {
    piece = chunk(piece, layout.mesh_sizes()[pos(m)], coordinate[pos(m)]);
  }
  std::vector<bool> out(pos(extent), false);
  for (const auto position : piece) {
    out[pos(position)] = true;
  }
  return out;
}

}  // namespace

Indices chunk(const Indices& list, std::int64_t parts, std::int64_t index) {
  const auto size = static_cast<std::int64_t>(list.size());
  const auto piece = (size + parts - 1) / parts;
  Indices out;
  for (std::int64_t i = index * piece; i < std::min(size, (index + 1) * piece); ++i) {
    out.push_back(list[pos(i)]);
  }
  return out;
}

Indices torch_indices(const Placements& placements, const Indices& mesh_sizes, int dim,
                      std::int64_t size, const Indices& coordinate) {
  auto held = arange(size);
  for (std::size_t m = 0; m < placements.size(); ++m) {
    if (const auto* shard = std::get_if<Shard>(&placements[m]); shard && shard->dim == dim) {
      held = chunk(held, mesh_sizes[m], coordinate[m]);
    }
    const auto* stride = std::get_if<StridedShard>(&placements[m]);
    if (stride && stride->dim == dim) {
      held = strided(held, stride->split_factor, mesh_sizes[m], coordinate[m]);
    }
  }
  return held;
}

Indices layout_indices(const Layout& layout, int dim, std::int64_t size,
                       const Indices& coordinate) {
  std::vector<std::vector<bool>> minor_first;
  const auto& digits = layout.digits(dim);
  for (auto digit = digits.rbegin(); digit != digits.rend(); ++digit) {
    minor_first.push_back(
        held(layout, *digit, digit->extent == 0 ? size : digit->extent, coordinate));
  }
  Indices out;
  for (std::int64_t index = 0; index < size; ++index) {
    bool mine = true;
    auto rest = index;
    for (const auto& positions : minor_first) {
      const auto extent = static_cast<std::int64_t>(positions.size());
      mine = mine && positions[pos(rest % extent)];
      rest /= extent;
    }
    if (mine) {
      out.push_back(index);
    }
  }
  return out;
}

std::vector<Indices> coordinates(const Indices& mesh_sizes) {
  std::vector<Indices> out{{}};
  for (const auto size : mesh_sizes) {
    std::vector<Indices> longer;
    for (const auto& prefix : out) {
      for (std::int64_t i = 0; i < size; ++i) {
        longer.push_back(prefix);
        longer.back().push_back(i);
      }
    }
    out = std::move(longer);
  }
  return out;
}

std::vector<std::vector<int>> all_lists(int length, int base) {
  std::vector<std::vector<int>> out;
  for (const auto& list : coordinates(Indices(static_cast<std::size_t>(length), base))) {
    out.emplace_back(list.begin(), list.end());
  }
  return out;
}

Indices numbers_in(const std::string& text) {
  Indices result;
  std::istringstream in(text);
  for (std::string word; in >> word;) {
    if (std::isdigit(static_cast<unsigned char>(word[0]))) {
      result.push_back(std::stoll(word));
    }
  }
  return result;
}

Placements placements_in(const std::string& text) {
  Placements result;
  std::size_t begin = 1;
  for (auto end = text.find(')'); end != std::string::npos; end = text.find(')', begin)) {
    result.push_back(parse_placement(text.substr(begin, end + 1 - begin)));
    begin = end + 3;
  }
  return result;
}

}  // namespace tessera::testing
