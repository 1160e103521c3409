#include "optim/matrix_exchange.h"

#include <algorithm>

#include "optim/parameters.h"
#include "tessera/dtensor/communication_scope.h"

namespace tessera::optim {
namespace {

struct Case {
  std::int64_t rows, columns;
  Placements placements;
};

/// Spreads the matrices, works on each whole, and compares with the whole result's own part.
void expect_exchanged(const DeviceMesh& mesh, const std::vector<Case>& cases) {
  std::vector<SpreadMatrix> matrices;
  std::vector<at::Tensor> locals, expected;
  const auto work = [](std::size_t i, const at::Tensor& whole) {
    return whole.sum(0, /*keepdim=*/true) + whole * static_cast<double>(i + 1);
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    const at::Tensor whole = normal_values({c.rows, c.columns}, static_cast<std::int64_t>(i));
    const auto part = [&](const at::Tensor& tensor) {
      return local_tensor(distribute_tensor(tensor, mesh, c.placements)).detach().contiguous();
    };
    const auto spread = distribute_tensor(whole, mesh, c.placements);
    matrices.push_back({spread.layout(), c.rows, c.columns});
    locals.push_back(part(whole));
    expected.push_back(part(work(i, whole)));
  }
  const MatrixExchange exchange(mesh, matrices);
  const std::vector<at::Tensor> results = exchange.run(locals, work);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    EXPECT_EQ(results[i].sizes(), expected[i].sizes());
    EXPECT_CLOSE(results[i], expected[i], 1e-6, 1e-6) << i;
  }
}

TEST_ON_MESH(MatrixExchange, OverOneMeshDimension, {4}, {"dp"}) {
  expect_exchanged(mesh, {{7, 5, {Shard{0}}},
                          {1, 3, {Shard{0}}},
                          {5, 6, {Shard{1}}},
                          {3, 3, {Replicate{}}},
                          {9, 2, {Shard{0}}}});
}

TEST_ON_MESH(MatrixExchange, OverTwoMeshDimensions, {3, 2}, {"dp", "tp"}) {
  expect_exchanged(mesh, {{7, 5, {Shard{0}, Shard{0}}},
                          {5, 4, {Shard{0}, Shard{1}}},
                          {2, 9, {Replicate{}, Shard{1}}},
                          {8, 3, {Shard{0}, Replicate{}}},
                          {4, 4, {Replicate{}, Replicate{}}}});
}

TEST_ON_MESH(MatrixExchange, WorksOnEachMatrixOnceAndEvenly, {2, 2}, {"replicate", "shard"}) {
  const LayoutPtr layout =
      to_layout({2, 2}, {Replicate{}, Shard{0}}, std::vector<std::int64_t>{8, 8});
  const std::vector<SpreadMatrix> matrices(8, SpreadMatrix{layout, 8, 8});
  const MatrixExchange exchange(mesh, matrices);
  for (std::int64_t owner = 0; owner < 4; ++owner) {
    EXPECT_EQ(std::ranges::count(exchange.owners(), owner), 2);
  }
  int calls = 0;
  const std::vector<at::Tensor> locals(8, at::ones({4, 8}));
  exchange.run(locals, [&](std::size_t, const at::Tensor& whole) {
    ++calls;
    return whole;
  });
  EXPECT_EQ(calls, 2);
}

// Each of 4 matrices of 8 x 8 is cut in 4: there, a rank sends its 16 elements of each; back, an
// owner sends 16 to each rank.
TEST_ON_MESH(MatrixExchange, CommunicatesTwoAllToAllsOfTheShards, {4}, {"dp"}) {
  const LayoutPtr layout = to_layout({4}, {Shard{0}}, std::vector<std::int64_t>{8, 8});
  const MatrixExchange exchange(mesh, std::vector<SpreadMatrix>(4, SpreadMatrix{layout, 8, 8}));
  const std::vector<at::Tensor> locals(4, at::ones({2, 8}, at::kBFloat16));
  const CommunicationScope communication(mesh);
  exchange.run(locals, [](std::size_t, const at::Tensor& whole) { return whole; });
  EXPECT_EQ(communication.total().calls, 2);
  EXPECT_EQ(communication.total().bytes, 2 * 4 * 16 * 2);
}

}  // namespace
}  // namespace tessera::optim
