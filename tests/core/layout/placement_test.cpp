
#include <fstream>

#include "oracle.h"
#include "tessera/core/detail/layout.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/detail/redistribute_plan.h"
#include "tessera/core/placement.h"
#include "testing/errors.h"

namespace tessera {
namespace {

TEST(Placement, PrintsLikePyTorchAndParsesTheText) {
  EXPECT_EQ(to_string(Placement(Shard{1})), "Shard(1)");
  EXPECT_EQ(to_string(Placement(Replicate{})), "Replicate()");
  EXPECT_EQ(to_string(Placement(Partial{})), "Partial(sum)");
  EXPECT_EQ(to_string(Placement(StridedShard{0, 2})), "_StridedShard(dim=0, sf=2)");
  EXPECT_EQ(detail::concat(ReduceOp::kMax, " ", Placement(Shard{1}), " ",
                           Placements{Shard{0}, Replicate{}}),
            "max Shard(1) [Shard(0), Replicate()]");
  for (const Placement& placement :
       {Placement(Shard{3}), Placement(Shard{-1}), Placement(Replicate{}),
        Placement(Partial{ReduceOp::kAvg}), Placement(Partial{ReduceOp::kProduct}),
        Placement(StridedShard{2, 6})}) {
    EXPECT_EQ(parse_placement(to_string(placement)), placement);
  }
}

TEST(Placement, ParsesShortForms) {
  EXPECT_EQ(parse_placement("R"), Placement(Replicate{}));
  EXPECT_EQ(parse_placement("P"), Placement(Partial{}));
  EXPECT_EQ(parse_placement("P(max)"), Placement(Partial{ReduceOp::kMax}));
  EXPECT_EQ(parse_placement("Partial()"), Placement(Partial{}));
  EXPECT_EQ(parse_placement("S(2)"), Placement(Shard{2}));
  EXPECT_EQ(parse_placement(" Shard( dim = -1 ) "), Placement(Shard{-1}));
  EXPECT_EQ(parse_placement("_StridedShard(1, split_factor=4)"), Placement(StridedShard{1, 4}));
}

TEST(Placement, ParserRefusesInvalidText) {
  for (const char* text :
       {"", "(", ")", "S", "Shard", "Shard()", "Shard(x)", "Shard(1", "Shard(0)x", "Replicate(1)",
        "Partial(band)", "Shard(99999999999999999999)", "_StridedShard(0)",
        "_StridedShard(dim=0, sf=0)", "shard(0)"}) {
    EXPECT_ERROR(parse_placement(text), "is not understood") << text;
  }
}

TEST(Placement, DistinguishesShardPartialAndReplicate) {
  EXPECT_TRUE(is_shard(Shard{1}, 1));
  EXPECT_FALSE(is_shard(Shard{1}, 0));
  EXPECT_FALSE(is_shard(StridedShard{1, 2}));
  EXPECT_TRUE(is_partial(Partial{ReduceOp::kMin}));
  EXPECT_TRUE(is_replicate(Placement{}));
}

using testing::coordinates;
using testing::Indices;
using testing::layout_indices;
using testing::torch_indices;

bool owns_as_torch(const Layout& layout, const Placements& placements, const Indices& sizes) {
  for (const auto& at : coordinates(layout.mesh_sizes())) {
    for (int d = 0; d < layout.tensor_ndim(); ++d) {
      const auto size = sizes[static_cast<std::size_t>(d)];
      if (layout_indices(layout, d, size, at) !=
          torch_indices(placements, layout.mesh_sizes(), d, size, at)) {
        return false;
      }
    }
  }
  return true;
}

TEST(ToLayout, CountsNegativeDimensionsFromTheEnd) {
  EXPECT_EQ(to_layout({2}, {Shard{-1}}, Indices{4, 4}), to_layout({2}, {Shard{1}}, Indices{4, 4}));
}

TEST(ToLayout, RefusesInvalidPlacements) {
  const auto making = [](Indices mesh, Placements placements, Indices sizes) {
    return [=] { to_layout(mesh, placements, sizes); };
  };
  testing::expect_refusals(
      {{"large", making({2}, {Shard{1}}, {4}), {"shard dimension 1", "1 dimensions"}},
       {"negative", making({2}, {Shard{-2}}, {4}), {"shard dimension -2", "1 dimensions"}},
       {"scalar", making({2}, {Shard{0}}, {}), {"shard dimension 0", "0 dimensions"}},
       {"few", making({2, 2}, {Shard{0}}, {4}), {"1 for a mesh of 2 dimensions"}},
       {"size", making({2}, {StridedShard{0, 3}}, {8}), {"don't line up"}},
       {"factor", making({2, 3}, {StridedShard{0, 2}, Shard{0}}, {12}), {"don't line up"}},
       {"no factor", making({2}, {StridedShard{0, 0}}, {8}), {"split factor below 1"}}});
}

/// Converts placement lists to layouts and back. Each rank must have the indices that PyTorch gives
/// to the rank. The new lists must be equivalent to the old lists.
void check_all_even_lists(const Indices& mesh) {
  std::int64_t size = 60;
  for (const auto m : mesh) {
    size *= m;
  }
  const auto length = static_cast<int>(mesh.size());
  int converted = 0;
  for (const auto& list : testing::all_lists(length, 7)) {
    Placements placements;
    for (const int v : list) {
      placements.push_back(v == 0   ? Placement(Replicate{})
                           : v == 1 ? Placement(Shard{0})
                                    : Placement(StridedShard{0, v}));
    }
    LayoutPtr layout = nullptr;
    try {
      layout = to_layout(mesh, placements, Indices{size});
    } catch (const Error&) {
      continue;
    }
    ++converted;
    ASSERT_TRUE(owns_as_torch(*layout, placements, {size})) << to_string(placements);
    const auto back = to_placements(*layout, Indices{size});
    EXPECT_EQ(to_layout(mesh, back, Indices{size}), layout) << to_string(placements);
    EXPECT_TRUE(owns_as_torch(*layout, back, {size})) << to_string(back);
  }
  EXPECT_GE(converted, 7);
}

TEST(ToLayout, GivesPyTorchsIndicesForEvenShards) {
  for (const Indices& mesh :
       {Indices{2}, Indices{2, 2}, Indices{2, 3}, Indices{4, 2}, Indices{2, 2, 2}}) {
    check_all_even_lists(mesh);
  }
}

TEST(ToLayout, GivesPyTorchsIndicesForUnevenShards) {
  for (const Indices& mesh : {Indices{2, 2}, Indices{3, 2}, Indices{2, 4}}) {
    for (std::int64_t size = 0; size < 24; ++size) {
      for (const auto& list : testing::all_lists(2, 3)) {
        Placements placements;
        for (const int v : list) {
          placements.push_back(v == 2 ? Placement(Replicate{}) : Placement(Shard{v}));
        }
        const Indices sizes{size, 5};
        const auto layout = to_layout(mesh, placements, sizes);
        EXPECT_TRUE(owns_as_torch(*layout, placements, sizes)) << size << to_string(placements);
        EXPECT_EQ(to_placements(*layout, sizes), placements);
      }
    }
  }
}

/// As in FSDP over tensor parallelism, tp splits the tensor first, and dp then splits each tp
/// shard. Shards can be uneven.
TEST(ToLayout, NestsUnevenChunksOfFsdpInsideTensorParallelism) {
  for (std::int64_t size = 0; size < 24; ++size) {
    const Indices mesh{2, 3};
    const Placements placements{StridedShard{0, 3}, Shard{0}};
    const auto layout = to_layout(mesh, placements, Indices{size});
    Indices all;
    for (std::int64_t i = 0; i < size; ++i) {
      all.push_back(i);
    }
    for (const auto& at : coordinates(mesh)) {
      const auto tp = testing::chunk(all, 3, at[1]);
      EXPECT_EQ(layout_indices(*layout, 0, size, at), testing::chunk(tp, 2, at[0])) << size;
    }
    EXPECT_EQ(to_placements(*layout, Indices{size}), placements);
  }
}

TEST(ToPlacements, ConvertsLayoutsToPlacements) {
  const auto layout = Layout::intern({2, 2, 2}, {{{0, {2}}}}, {{0, ReduceOp::kAvg}});
  EXPECT_EQ(to_placements(*layout, Indices{4}),
            (Placements{Partial{ReduceOp::kAvg}, Replicate{}, Shard{0}}));
  const Placements placements{Shard{0}, Shard{0}};
  EXPECT_EQ(to_placements(*to_layout({1, 2}, placements, Indices{6}), Indices{6}), placements);
  EXPECT_ERROR(to_placements(*Layout::intern({2}, {{{5, {0}}, {4, {}}}}), Indices{20}),
               "has no form as a list of placements");
}

// The following tests check the examples of docs/sharding.md.

using testing::numbers_in;
using testing::placements_in;
using Lines = std::vector<std::string>;

/// Returns the lines of all code blocks of docs/sharding.md that begin with "```" and `kind`.
Lines examples(const std::string& kind) {
  std::ifstream file(TESSERA_SHARDING_DOC);
  Lines out;
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("```")) {
      inside = line == "```" + kind;
    } else if (inside) {
      out.push_back(line);
    }
  }
  return out;
}

Lines split(const std::string& text, const std::string& separator) {
  Lines out;
  std::size_t begin = 0;
  for (auto end = text.find(separator); end != std::string::npos;
       end = text.find(separator, begin)) {
    out.push_back(text.substr(begin, end - begin));
    begin = end + separator.size();
  }
  out.push_back(text.substr(begin));
  return out;
}

TEST(ShardingDoc, ShowsTheLayoutsOfItsExamples) {
  const auto lines = examples("layout");
  ASSERT_GE(lines.size(), 9U);
  for (const auto& line : lines) {
    const auto part = split(line, "; ");
    const auto sizes = numbers_in(part.at(1));
    const auto layout = to_layout(numbers_in(part[0]), placements_in(part.at(2)), sizes);
    EXPECT_EQ(to_string(*layout), part.at(3));
    EXPECT_EQ(to_string(to_placements(*layout, sizes)), part[2]);
  }
}

TEST(ShardingDoc, ShowsTheIndicesOfEachCoordinate) {
  const auto lines = examples("indices");
  ASSERT_GE(lines.size(), 9U);
  for (const auto& line : lines) {
    const auto part = split(line, "; ");
    const auto owned = split(part.at(3), ":");
    const auto size = numbers_in(part[1]);
    const auto layout = to_layout(numbers_in(part[0]), placements_in(part[2]), size);
    EXPECT_EQ(global_indices(*layout, 0, size[0], numbers_in(owned.at(0))), numbers_in(owned.at(1)))
        << line;
  }
}

TEST(ShardingDoc, ListsPlacementsThatAreRefused) {
  const auto lines = examples("refused");
  ASSERT_GE(lines.size(), 3U);
  for (const auto& line : lines) {
    const auto part = split(line, "; ");
    EXPECT_ERROR(to_layout(numbers_in(part[0]), placements_in(part[2]), numbers_in(part[1])),
                 "placements " + to_string(placements_in(part[2])))
        << line;
  }
}

TEST(ShardingDoc, ShowsTheRedistributionPlansOfItsExamples) {
  std::string text;
  for (const auto& line : examples("plan")) {
    text += line + "\n";
  }
  const auto blocks = split(text, "\n\n");
  ASSERT_GE(blocks.size(), 7U);
  for (const auto& block : blocks) {
    const auto head = block.substr(0, block.find('\n'));
    auto steps = block.substr(head.size() + 1);
    if (!steps.ends_with('\n')) {
      steps += '\n';
    }
    const auto part = split(head, "; ");
    const auto ends = split(part.at(2), " -> ");
    const auto mesh = numbers_in(part[0]);
    const auto sizes = numbers_in(part[1]);
    const auto plan =
        plan_redistribution(to_layout(mesh, placements_in(ends.at(0)), sizes),
                            to_layout(mesh, placements_in(ends.at(1)), sizes), sizes, 4);
    EXPECT_EQ(to_string(plan), steps) << head;
  }
}

}  // namespace
}  // namespace tessera
