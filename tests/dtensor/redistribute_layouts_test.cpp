// Redistribution between layouts that placements seldom say: every order of mesh dimensions on one
// tensor dimension, local digits in front, three mesh dimensions.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <random>

#include "tessera/core/error.h"
#include "tessera/core/layout_math.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/policy.h"
#include "testing/errors.h"
#include "testing/ranks.h"

namespace tessera {
namespace {

using Sizes = std::vector<std::int64_t>;

int below(std::mt19937& engine, std::size_t n) {
  return static_cast<int>(engine() % n);
}

/// A layout without partial dimensions, drawn from `engine`, of which all ranks have the same.
LayoutPtr random_layout(std::mt19937& engine, const Sizes& mesh, const Sizes& sizes) {
  Layout::Dims dims;
  for (const auto size : sizes) {
    if (size % 2 == 0 && size > 2 && below(engine, 3) == 0) {
      dims.push_back({{2, {}}, {size / 2, {}}});
    } else {
      dims.push_back({{0, {}}});
    }
  }
  std::vector<int> order;
  for (int m = 0; m < static_cast<int>(mesh.size()); ++m) {
    order.insert(order.begin() + below(engine, order.size() + 1), m);
  }
  for (const int m : order) {
    const auto dim = static_cast<std::size_t>(below(engine, sizes.size() + 1));
    if (dim == sizes.size()) continue;
    auto& digits = dims[dim];
    digits[static_cast<std::size_t>(below(engine, digits.size()))].mesh_dims.push_back(m);
  }
  return Layout::intern(mesh, std::move(dims));
}

at::Tensor part_of(const at::Tensor& whole, const DeviceMesh& mesh, const Layout& layout) {
  auto result = whole;
  for (int dim = 0; dim < layout.tensor_ndim(); ++dim) {
    const auto indices = global_indices(layout, dim, whole.size(dim), mesh.coordinate());
    result = result.index_select(dim, at::tensor(indices, at::kLong));
  }
  return result;
}

void check_random_pairs(const Sizes& mesh_sizes, const Sizes& sizes) {
  std::int64_t ranks = 1;
  for (const auto size : mesh_sizes) ranks *= size;
  RunRanks(static_cast<int>(ranks), [&](Rank& rank) {
    const auto mesh = rank.mesh(mesh_sizes, {});
    std::int64_t numel = 1;
    for (const auto size : sizes) numel *= size;
    const auto whole = at::arange(numel, at::kFloat).view(sizes);
    std::mt19937 engine(7);
    for (int i = 0; i < 150; ++i) {
      const auto from = random_layout(engine, mesh_sizes, sizes);
      const auto to = random_layout(engine, mesh_sizes, sizes);
      const auto t = DistributedTensor::from_local(part_of(whole, mesh, *from),
                                                   ShardingSpec{mesh, from}, sizes);
      const auto moved = local_tensor(t.redistribute(to));
      EXPECT_TRUE(at::equal(moved, part_of(whole, mesh, *to)))
          << to_string(*from) << " -> " << to_string(*to);
    }
  });
}

TEST(RedistributeLayouts, MovesEvenTensorsOn2x2) {
  check_random_pairs({2, 2}, {8, 4});
}
TEST(RedistributeLayouts, MovesUnevenTensorsOn2x2) {
  check_random_pairs({2, 2}, {7, 6});
}
TEST(RedistributeLayouts, MovesEvenTensorsOn2x2x2) {
  check_random_pairs({2, 2, 2}, {16, 8, 4});
}
TEST(RedistributeLayouts, MovesUnevenTensorsOn3x2) {
  check_random_pairs({3, 2}, {10, 3});
}
TEST(RedistributeLayouts, MovesTensorsWithEmptyShardsOn1x2x2) {
  check_random_pairs({1, 2, 2}, {2, 6});
}

// Of 12 positions 8 and 4: no list of placements says that.
TEST(RedistributeLayouts, ErrorsNameALayoutThatHasNoPlacements) {
  RunRanks(2, [](Rank& rank) {
    const auto mesh = rank.mesh({2}, {"x"});
    const auto layout = Layout::intern({2}, {{{3, {0}}, {4, {}}}});
    const auto whole = at::arange(12, at::kFloat);
    EXPECT_THROW(to_placements(*layout, whole.sizes()), Error);
    EXPECT_THAT_ERROR(
        DistributedTensor::from_local(whole.slice(0, 0, 6), ShardingSpec{mesh, layout}, {12}),
        "as [3:m0 x 4]");
    const auto x = DistributedTensor::from_local(part_of(whole, mesh, *layout),
                                                 ShardingSpec{mesh, layout}, {12});
    const auto y = distribute_tensor(whole, mesh, {Shard{0}});
    {
      const StrictScope strict;
      EXPECT_THAT_ERROR(at::add(x, y), "[3:m0 x 4]");
    }
    EXPECT_TRUE(at::equal(DistributedTensor(at::add(x, y)).full_tensor(), whole + whole));
  });
}

}  // namespace
}  // namespace tessera
