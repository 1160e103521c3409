#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/core/layout_math.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "testing/ranks.h"

namespace tessera {
namespace {

at::Tensor arange(const std::vector<std::int64_t>& sizes) {
  std::int64_t numel = 1;
  for (auto size : sizes) numel *= size;
  return at::arange(numel, at::kFloat).view(sizes);
}

/// This rank's part of arange(sizes) as `layout` says, by index arithmetic alone. Over partial mesh
/// dimensions coordinate 0 holds the value, the others nothing.
at::Tensor expected_local(const DeviceMesh& mesh, const Layout& layout,
                          const std::vector<std::int64_t>& sizes) {
  auto result = arange(sizes);
  for (int dim = 0; dim < layout.tensor_ndim(); ++dim) {
    const auto indices =
        global_indices(layout, dim, sizes[static_cast<std::size_t>(dim)], mesh.coordinate());
    result = result.index_select(dim, at::tensor(indices, at::kLong));
  }
  for (const auto& partial : layout.partial()) {
    if (mesh.local_rank(partial.mesh_dim) != 0) result = at::zeros_like(result);
  }
  return result;
}

const std::vector<Placement>& choices() {
  static const std::vector<Placement> all{Replicate{}, Shard{0}, Shard{1}, Partial{}};
  return all;
}

std::vector<Placements> all_placements() {
  std::vector<Placements> result;
  for (const auto& a : choices()) {
    for (const auto& b : choices()) result.push_back({a, b});
  }
  return result;
}

/// The value of a tensor whose parts are partial is what they sum to.
void expect_value(const DistributedTensor& t, const std::vector<std::int64_t>& sizes,
                  const std::string& what) {
  EXPECT_TRUE(at::equal(t.full_tensor(), arange(sizes))) << what;
}

void check_pair(const DeviceMesh& mesh, const Placements& from, const Placements& to,
                const std::vector<std::int64_t>& sizes) {
  const auto what = to_string(from) + " -> " + to_string(to);
  const auto* source = to_layout(mesh.shape().sizes(), from, sizes);
  const auto* target = to_layout(mesh.shape().sizes(), to, sizes);
  const auto t = DistributedTensor::from_local(expected_local(mesh, *source, sizes),
                                               ShardingSpec{mesh, source}, sizes);
  const auto moved = t.redistribute(to);
  EXPECT_EQ(moved.placements(), to) << what;
  if (!target->is_partial()) {
    EXPECT_TRUE(at::equal(local_tensor(moved), expected_local(mesh, *target, sizes))) << what;
  }
  expect_value(moved, sizes, what);
}

void check_all_pairs(const std::vector<std::int64_t>& sizes) {
  RunRanks(4, [&](Rank& rank) {
    const auto mesh = rank.mesh({2, 2}, {"a", "b"});
    for (const auto& from : all_placements()) {
      for (const auto& to : all_placements()) check_pair(mesh, from, to, sizes);
    }
  });
}

TEST(Redistribute, MovesEvenTensorsBetweenAllPairs) {
  check_all_pairs({8, 4});
}
TEST(Redistribute, MovesUnevenTensorsBetweenAllPairs) {
  check_all_pairs({7, 5});
}
TEST(Redistribute, MovesTensorsWithEmptyShardsBetweenAllPairs) {
  check_all_pairs({3, 1});
}
TEST(Redistribute, MovesThreeDimensionalTensorsBetweenAllPairs) {
  check_all_pairs({3, 5, 2});
}

}  // namespace
}  // namespace tessera
