// Operators that libtorch builds of many others, where it writes to views, reads expanded tensors
// or meets shards without a position.

#include "dtensor/operators/operator_case.h"
#include "tessera/dtensor/communication_scope.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::OperatorCase;
using testing::Operators;
using Tensors = std::vector<at::Tensor>;

std::vector<OperatorCase> composites() {
  return {
      {"conv1d",
       {{5, 4, 6}, {6, 2, 3}, {6}},
       [](const Tensors& t) { return at::conv1d(t[0], t[1], t[2], 1, at::IntArrayRef{1}, 1, 2); }},
      {"conv1d_of_one_sample",
       {{3, 6}, {5, 3, 3}, {5}},
       [](const Tensors& t) { return at::conv1d(t[0], t[1], t[2]); }},
      {"conv2d",
       {{3, 2, 5, 4}, {3, 2, 2, 2}, {3}},
       [](const Tensors& t) { return at::conv2d(t[0], t[1], t[2], 2); }},
      {"conv_transpose1d",
       {{2, 3, 5}, {3, 2, 3}, {2}},
       [](const Tensors& t) { return at::conv_transpose1d(t[0], t[1], t[2], 2); }},
      {"conv_transpose2d",
       {{5, 2, 3, 2}, {2, 1, 2, 2}, {2}},
       [](const Tensors& t) { return at::conv_transpose2d(t[0], t[1], t[2], 1, 0, 0, 2); }},
      {"householder_product",
       {{5, 3}, {3}},
       [](const Tensors& t) { return at::linalg_householder_product(t[0], t[1]); }},
      {"householder_products",
       {{2, 5, 3}, {2, 3}},
       [](const Tensors& t) { return at::linalg_householder_product(t[0], t[1]); }},
      {"ormqr",
       {{5, 3}, {3}, {5, 2}},
       [](const Tensors& t) { return at::ormqr(t[0], t[1], t[2]); }},
      {"combinations", {{5}}, [](const Tensors& t) { return at::combinations(t[0]); }},
      {"masked_select",
       {{5}},
       [](const Tensors& t) {
         const auto chosen = t[0].detach().expand({3, 5}).gt(0);
         return at::masked_select(t[0].expand({3, 5}), chosen);
       }},
      {"istft",
       {{5, 7, 2}},
       [](const Tensors& t) { return at::istft(at::view_as_complex(t[0].contiguous()), 8, 2); }},
      // The masks, positions and numbers of these are plain tensors.
      {"one_hot",
       {{5, 2}},
       [](const Tensors& t) {
         return at::one_hot(t[0].detach().abs().mul(3).to(at::kLong), 4).to(at::kDouble);
       },
       false},
      {"matrix_power_0",
       {{2, 4, 4}},
       [](const Tensors& t) { return at::linalg_matrix_power(t[0], 0) + t[0]; }},
      {"matrix_rank",
       {{5, 3, 4}},
       [](const Tensors& t) { return at::linalg_matrix_rank(t[0], 1e-9).to(at::kDouble); },
       false},
      {"ctc_loss_of_lengths",
       {{5, 2, 4}, {2, 3}, {2}},
       [](const Tensors& t) {
         const auto targets = t[1].detach().abs().mul(3).to(at::kLong) + 1;
         const auto two = t[2].detach().mul(0).to(at::kLong) + 2;
         return at::ctc_loss(t[0].log_softmax(2), targets, two + 3, two);
       }},
      {"ctc_loss",
       {{5, 2, 4}, {2, 3}},
       [](const Tensors& t) {
         const auto targets = t[1].detach().abs().mul(3).to(at::kLong) + 1;
         return at::ctc_loss(t[0].log_softmax(2), targets, {5, 4}, {2, 2});
       }},
  };
}

INSTANTIATE_TEST_SUITE_P(Composite, Operators, ::testing::ValuesIn(composites()),
                         [](const auto& info) { return info.param.name; });

// It views a product of expanded tensors, which a part of size 1 has in another order in memory
// than the whole.
TEST(Kronecker, ProductOfTransposedMatricesEqualsOneRank) {
  const auto kron = [](const Tensors& t) { return at::kron(t[0].t(), t[1].t()); };
  for (const auto& mesh : {std::vector<std::int64_t>{2, 2}, {4}}) {
    for (const auto& sizes : {std::vector<std::int64_t>{4, 2}, {5, 3}, {4, 3}}) {
      testing::expect_equals_one_rank({"kron", {sizes, {2, 3}}, kron}, mesh);
    }
  }
}

TEST(OneHot, IsDistributedAsItsArgument) {
  RunOnMesh({3}, {"x"}, [](const DeviceMesh& mesh) {
    const auto classes = at::arange(10).remainder(4).view({5, 2});
    for (const auto& placement :
         {Placement{Shard{0}}, Placement{Shard{1}}, Placement{Replicate{}}}) {
      const at::Tensor x = distribute_tensor(classes, mesh, {placement});
      for (const std::int64_t count : {-1, 4, 6}) {
        const DistributedTensor found(at::one_hot(x, count));
        EXPECT_EQ(to_string(found.placements()), to_string(Placements{placement}));
        EXPECT_TRUE(at::equal(found.full_tensor(), at::one_hot(classes, count)));
      }
      EXPECT_THROWN(c10::Error, at::one_hot(x, 3), "Class values must be smaller than num_classes");
      EXPECT_THROWN(c10::Error, at::one_hot(x - 1), "Class values must be non-negative");
    }
    EXPECT_TRUE(tessera::is_distributed(
        at::one_hot(distribute_tensor(at::zeros({0}, at::kLong), mesh, {Shard{0}}).tensor(), 2)));
  });
}

// Where no gradient is wanted libtorch would run a kernel on the memory of its argument.
TEST(Pooling, WithoutAGradientEqualsOneRank) {
  RunRanks(4, [](Rank& rank) {
    const auto value = at::sin(at::arange(30.0)).view({5, 6});
    for (const auto& placement : {Placement{Shard{0}}, Placement{Shard{1}}, Placement{Partial{}}}) {
      const auto x = distribute_tensor(value, rank.mesh({4}, {"x"}), {placement}).tensor().detach();
      const auto pooled = DistributedTensor(at::max_pool1d(x, 2)).full_tensor();
      EXPECT_TRUE(at::equal(pooled, at::max_pool1d(value, 2)));
    }
  });
}

TEST(Concatenation, GathersARepeatedTensorOnce) {
  RunOnMesh({4}, {"x"}, [](const DeviceMesh& mesh) {
    const auto value = at::sin(at::arange(15.0)).view({5, 3});
    const auto x = distribute_tensor(value, mesh, {Shard{0}}).tensor().detach();
    const auto row = value.narrow(0, 0, 1);
    const auto last = distribute_tensor(row, mesh, {Replicate{}}).tensor().detach();
    const CommunicationScope communication(mesh);
    const auto joined = at::cat({x, x, last});
    EXPECT_EQ(communication.total().calls, 1);
    EXPECT_TRUE(at::equal(DistributedTensor(joined).full_tensor(), at::cat({value, value, row})));
  });
}

TEST(Concatenation, GathersNothingForTensorsOfOneSize) {
  RunOnMesh({4}, {"x"}, [](const DeviceMesh& mesh) {
    const auto value = at::sin(at::arange(15.0)).view({5, 3});
    const auto x = distribute_tensor(value, mesh, {Shard{0}}).tensor().detach();
    const CommunicationScope communication(mesh);
    const DistributedTensor joined(at::cat({x, x, x}));
    EXPECT_EQ(communication.total().calls, 0);
    EXPECT_EQ(joined.placements(), (Placements{StridedShard{0, 3}}));
    EXPECT_TRUE(at::equal(joined.full_tensor(), at::cat({value, value, value})));
  });
}

}  // namespace
}  // namespace tessera
