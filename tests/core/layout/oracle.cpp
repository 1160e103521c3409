#include "oracle.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
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

/// For each position of a digit: whether the coordinate owns it.
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

namespace {

constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();

double fold(ReduceOp op, const std::vector<double>& terms) {
  double out = terms.front();
  for (std::size_t i = 1; i < terms.size(); ++i) {
    if (op == ReduceOp::kSum || op == ReduceOp::kAvg) {
      out += terms[i];
    }
    if (op == ReduceOp::kMax) {
      out = std::max(out, terms[i]);
    }
    if (op == ReduceOp::kMin) {
      out = std::min(out, terms[i]);
    }
    if (op == ReduceOp::kProduct) {
      out *= terms[i];
    }
  }
  return op == ReduceOp::kAvg ? out / static_cast<double>(terms.size()) : out;
}

double identity(ReduceOp op, double value) {
  switch (op) {
    case ReduceOp::kSum:
      return 0;
    case ReduceOp::kAvg:
      return value;
    case ReduceOp::kMax:
      return -std::numeric_limits<double>::infinity();
    case ReduceOp::kMin:
      return std::numeric_limits<double>::infinity();
    case ReduceOp::kProduct:
      return 1;
  }
  return kMissing;
}

/// Term `index` of `parts` terms that reduce to `value`; the terms differ and are exact in binary.
double term(ReduceOp op, double value, std::int64_t parts, std::int64_t index) {
  const auto at = static_cast<double>(index);
  const auto centred = 2 * at - static_cast<double>(parts - 1);  // sums to 0
  switch (op) {
    case ReduceOp::kSum:
      return index == 0 ? value - 8 * centred : -8 * centred;
    case ReduceOp::kAvg:
      return value + 4 * centred;
    case ReduceOp::kMax:
      return value - 16 * at;
    case ReduceOp::kMin:
      return value + 16 * at;
    case ReduceOp::kProduct:
      return (index == 0 ? value : 1.0) * std::exp2(centred);
  }
  return kMissing;
}

std::int64_t numel(const Indices& sizes) {
  std::int64_t out = 1;
  for (const auto size : sizes) {
    out *= size;
  }
  return out;
}

}  // namespace

SimulatedWorld::SimulatedWorld(LayoutPtr layout, Indices sizes)
    : sizes_(std::move(sizes)), coordinates_(coordinates(layout->mesh_sizes())), layout_(layout) {
  for (const auto& coordinate : coordinates_) {
    auto& local = locals_.emplace_back(pos(numel(sizes_)), kMissing);
    const auto mine = owned(*layout, coordinate);
    for (std::size_t i = 0; i < local.size(); ++i) {
      if (!mine[i]) {
        continue;
      }
      local[i] = static_cast<double>(i + 1);
      for (const auto& [m, op] : layout->partial()) {
        local[i] = term(op, local[i], layout->mesh_sizes()[pos(m)], coordinate[pos(m)]);
      }
    }
  }
}

std::vector<bool> SimulatedWorld::owned(const Layout& layout, const Indices& coordinate) const {
  std::vector<bool> out{true};
  for (int d = 0; d < layout.tensor_ndim(); ++d) {
    std::vector<bool> along(pos(sizes_[pos(d)]), false);
    for (const auto i : layout_indices(layout, d, sizes_[pos(d)], coordinate)) {
      along[pos(i)] = true;
    }
    std::vector<bool> next;
    for (const bool outer : out) {
      for (const bool inner : along) {
        next.push_back(outer && inner);
      }
    }
    out = std::move(next);
  }
  return out;
}

std::vector<std::size_t> SimulatedWorld::group(std::size_t rank,
                                               const std::vector<int>& mesh_dims) const {
  std::vector<std::size_t> out;
  for (std::size_t other = 0; other < coordinates_.size(); ++other) {
    auto moved = coordinates_[other];
    for (const int m : mesh_dims) {
      moved[pos(m)] = coordinates_[rank][pos(m)];
    }
    if (moved == coordinates_[rank]) {
      out.push_back(other);
    }
  }
  return out;
}

double SimulatedWorld::combine(std::size_t rank, const Step& step, std::size_t element) const {
  std::vector<double> terms;
  for (const auto other : group(rank, step.mesh_dims)) {
    terms.push_back(locals_[other][element]);
  }
  return fold(step.op, terms);
}

double SimulatedWorld::received(std::size_t rank, const Step& step, std::size_t element) const {
  for (const auto other : group(rank, step.mesh_dims)) {
    if (!std::isnan(locals_[other][element])) {
      return locals_[other][element];
    }
  }
  return kMissing;
}

void SimulatedWorld::run(const Step& step) {
  ASSERT_EQ(step.from, layout_);
  auto after = locals_;
  for (std::size_t rank = 0; rank < locals_.size(); ++rank) {
    const auto mine = owned(*step.to, coordinates_[rank]);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      auto& value = after[rank][i];
      if (!mine[i]) {
        value = kMissing;
        continue;
      }
      const bool reduces =
          step.kind == StepKind::kAllReduce || step.kind == StepKind::kReduceScatter;
      const bool gathers = step.kind == StepKind::kAllGather || step.kind == StepKind::kAllToAll;
      if (reduces) {
        value = combine(rank, step, i);
      }
      if (gathers) {
        value = received(rank, step, i);
      }
      if (step.kind == StepKind::kMakePartial &&
          coordinates_[rank][pos(step.mesh_dims.front())] != 0) {
        value = identity(step.op, value);
      }
      ASSERT_FALSE(std::isnan(value)) << "rank " << rank << " cannot have element " << i;
    }
  }
  locals_ = std::move(after);
  layout_ = step.to;
}

void SimulatedWorld::expect_correct(LayoutPtr layout) const {
  ASSERT_EQ(layout_, layout);
  auto reduced = *this;  // the inner mesh dimensions are reduced first, as Layout defines it
  const auto& partial = layout->partial();
  for (auto p = partial.rbegin(); p != partial.rend(); ++p) {
    auto fewer = reduced.layout_->partial();
    fewer.pop_back();
    const auto to = Layout::intern(layout->mesh_sizes(), reduced.layout_->dims(), std::move(fewer));
    reduced.run({.kind = StepKind::kAllReduce,
                 .mesh_dims = {p->mesh_dim},
                 .op = p->op,
                 .from = reduced.layout_,
                 .to = to});
  }
  for (std::size_t rank = 0; rank < locals_.size(); ++rank) {
    const auto mine = owned(*layout, coordinates_[rank]);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      EXPECT_EQ(!std::isnan(reduced.locals_[rank][i]), mine[i]);
      EXPECT_TRUE(!mine[i] || reduced.locals_[rank][i] == static_cast<double>(i + 1)) << i;
    }
  }
}

std::int64_t SimulatedWorld::most_sent(const Step& step) const {
  std::int64_t most = 0;
  for (std::size_t rank = 0; rank < locals_.size(); ++rank) {
    const auto before = owned(*step.from, coordinates_[rank]);
    const auto after = owned(*step.to, coordinates_[rank]);
    const auto others = static_cast<std::int64_t>(group(rank, step.mesh_dims).size()) - 1;
    std::int64_t sent = 0;
    for (std::size_t i = 0; i < before.size(); ++i) {
      if (step.kind == StepKind::kAllGather) {
        sent += before[i] ? others : 0;
      }
      if (step.kind == StepKind::kAllToAll || step.kind == StepKind::kReduceScatter) {
        sent += before[i] && !after[i] ? 1 : 0;
      }
    }
    const auto held = std::count(before.begin(), before.end(), true);
    if (step.kind == StepKind::kAllReduce) {
      sent = 2 * (held - held / (others + 1));
    }
    most = std::max(most, sent);
  }
  return most;
}

}  // namespace tessera::testing
