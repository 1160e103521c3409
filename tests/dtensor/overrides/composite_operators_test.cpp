#include "dtensor/operators/operator_case.h"
#include "tessera/dtensor/communication_scope.h"
#include "testing/distributed.h"
#include "testing/environment.h"

namespace tessera {

// Tests operators that libtorch computes by other operators, some of which write to views, read
// expanded tensors or get empty shards.

namespace {

using testing::OperatorCases;
using testing::Operators;
using testing::values;
using Tensors = std::vector<at::Tensor>;

OperatorCases composites() {
  OperatorCases c;
  c.add("conv1d_of_one_sample", {{3, 6}, {5, 3, 3}, {5}},
        [](auto& t) { return at::conv1d(t[0], t[1], t[2]); });
  c.add("conv_transpose2d", {{5, 2, 3, 2}, {2, 1, 2, 2}, {2}},
        [](auto& t) { return at::conv_transpose2d(t[0], t[1], t[2], 1, 0, 0, 2); });
  c.add("householder_products", {{2, 5, 3}, {2, 3}},
        [](auto& t) { return at::linalg_householder_product(t[0], t[1]); });
  c.add("masked_select", {{5}}, [](auto& t) {
    const auto chosen = t[0].detach().expand({3, 5}).gt(0);
    return at::masked_select(t[0].expand({3, 5}), chosen);
  });
  c.add("istft", {{5, 7, 2}},
        [](auto& t) { return at::istft(at::view_as_complex(t[0].contiguous()), 8, 2); });
  c.add(
      "one_hot", {{5, 2}},
      [](auto& t) {
        return at::one_hot(t[0].detach().abs().mul(3).to(at::kLong), 4).to(at::kDouble);
      },
      false);
  c.add("matrix_power_0", {{2, 4, 4}},
        [](auto& t) { return at::linalg_matrix_power(t[0], 0) + t[0]; });
  c.add("ctc_loss_of_lengths", {{5, 2, 4}, {2, 3}, {2}}, [](auto& t) {
    const auto targets = t[1].detach().abs().mul(3).to(at::kLong) + 1;
    const auto two = t[2].detach().mul(0).to(at::kLong) + 2;
    return at::ctc_loss(t[0].log_softmax(2), targets, two + 3, two);
  });
  c.add("quantiles", {{5, 3}, {4}}, [](auto& t) { return at::quantile(t[0], t[1].square(), 1); });
  return c;
}

INSTANTIATE_TEST_SUITE_P(Composite, Operators, ::testing::ValuesIn(composites()),
                         [](const auto& info) { return info.param.name; });

TEST_ON_MESH(Concatenation, GathersARepeatedTensorAtMostOnce, {4}, {"x"}) {
  const auto value = at::sin(at::arange(15.0)).view({5, 3}), row = value.narrow(0, 0, 1);
  const auto x = distribute_tensor(value, mesh, {Shard{0}}).tensor().detach();
  const auto last = distribute_tensor(row, mesh, {Replicate{}}).tensor().detach();
  const CommunicationScope communication(mesh);
  const DistributedTensor equal(at::cat({x, x, x}));
  EXPECT_EQ(communication.total().calls, 0);
  const auto unequal = at::cat({x, x, last});
  EXPECT_EQ(communication.total().calls, 1);
  EXPECT_EQ(equal.placements(), (Placements{StridedShard{0, 3}}));
  EXPECT_EQUAL(equal, at::cat({value, value, value}));
  EXPECT_EQUAL(unequal, at::cat({value, value, row}));
}

TEST_ON_MESH(Quantile, WritesToADistributedResult, {4}, {"x"}) {
  const at::Tensor x = distribute_tensor(values({6, 3}), mesh, {Shard{0}}).tensor();
  at::Tensor out = distribute_tensor(at::zeros({3}, at::kDouble), mesh, {Replicate{}}).tensor();
  at::nanquantile_out(out, x, 0.3, 0);
  const at::Tensor expected = at::nanquantile(values({6, 3}), 0.3, 0);
  EXPECT_EQUAL(out, expected);
  EXPECT_ERROR(at::nanquantile_out(out, x, 0.3), "would resize a distributed tensor");
}

// Composite operators with an `out` argument must write to a distributed `out`.

struct OutCase {
  const char* name;
  std::vector<std::vector<std::int64_t>> inputs;
  std::vector<std::int64_t> result;
  std::function<void(at::Tensor& out, const Tensors&)> run;
};

TEST_ON_MESH(OutVariant, WritesToReplicatedAndShardedTensors, {4}, {"x"}) {
  const std::vector<OutCase> all{
      {"maximum_of_all",
       {{4}},
       {1},
       [](auto& out, auto& t) { at::amax_out(out, t[0], {0}, true); }},
      {"matmul_of_batches",
       {{5, 3, 2}, {5, 2, 4}},
       {5, 3, 4},
       [](auto& out, auto& t) { at::matmul_out(out, t[0], t[1]); }},
      {"log_sigmoid", {{5, 3}}, {5, 3}, [](auto& out, auto& t) { at::log_sigmoid_out(out, t[0]); }},
      {"solve",
       {{5, 2, 2}, {5, 2, 3}},
       {5, 2, 3},
       [](auto& out, auto& t) { at::linalg_solve_out(out, t[0], t[1]); }},
      {"inverse", {{5, 2, 2}}, {5, 2, 2}, [](auto& out, auto& t) {
         at::linalg_inv_out(out, t[0]);
       }}};
  for (const OutCase& c : all) {
    for (const Placement& placement : {Placement{Replicate{}}, Placement{Shard{0}}}) {
      Tensors plain, inputs;
      for (const auto& sizes : c.inputs) {
        plain.push_back(values(sizes));
        inputs.push_back(distribute_tensor(plain.back(), mesh, {Shard{0}}));
      }
      at::Tensor expected = at::zeros(c.result, at::kDouble);
      at::Tensor out = distribute_tensor(expected.clone(), mesh, {placement});
      c.run(expected, plain);
      c.run(out, inputs);
      EXPECT_EQ(DistributedTensor(out).placements(), Placements{placement}) << c.name;
      EXPECT_CLOSE(out, expected) << c.name;
    }
  }
}

TEST(OutVariantOfWrongSize, IsRefusedOnAllRanks) {
  const auto errors = testing::ErrorsOfRanks(4, [](Rank& rank) {
    const auto mesh = rank.mesh({4}, {"x"});
    const at::Tensor x = distribute_tensor(values({5, 3}), mesh, {Shard{0}});
    at::Tensor out = distribute_tensor(at::zeros({15, 1}, at::kDouble), mesh, {Shard{0}});
    at::kron_out(out, x, x);
  });
  EXPECT_CONTAINS(errors, "would resize a distributed tensor of sizes [15, 1] to [25, 9]");
}

TEST_ON_MESH(OutVariantOfWrongSize, KeepsItsSizesUnlessEmpty, {4}, {"x"}) {
  const at::Tensor x = distribute_tensor(values({5, 3}), mesh, {Shard{0}});
  for (const Placement& placement : {Placement{Replicate{}}, Placement{Shard{0}}}) {
    at::Tensor out = distribute_tensor(at::zeros({2, 1}, at::kDouble), mesh, {placement});
    EXPECT_ERROR(at::add_out(out, x, x),
                 "would resize a distributed tensor of sizes [2, 1] to [5, 3]");
    EXPECT_EQ(DistributedTensor(out).full_tensor().sizes(), at::IntArrayRef({2, 1}));
    at::Tensor empty = distribute_tensor(at::zeros({0}, at::kDouble), mesh, {placement});
    at::add_out(empty, x, x);
    EXPECT_EQUAL(empty, values({5, 3}).mul(2));
  }
}

// The following tests call aten::embedding with a weight that is sharded along the vocabulary.

at::Tensor table(std::int64_t rows) {
  return at::arange(rows * 3, at::kDouble).view({rows, 3}).cos();
}

const at::Tensor& indices() {
  static const auto all = at::tensor({6, 0, 3, 3, 1, 6}, at::kLong).view({2, 3});
  return all;
}

struct BagCase {
  Placements weight, indices, result;
};

const std::vector<BagCase>& bag_cases() {
  const Partial sum;
  const Replicate whole;
  static const std::vector<BagCase> all{
      {{Shard{0}, whole}, {whole, whole}, {sum, whole}},
      {{Shard{0}, Shard{0}}, {whole, whole}, {sum, sum}},
      {{StridedShard{0, 2}, Shard{0}}, {whole, whole}, {sum, sum}},
      {{whole, Shard{0}}, {Shard{0}, whole}, {Shard{0}, sum}},
      {{Shard{1}, Shard{0}}, {whole, whole}, {Shard{2}, sum}},
  };
  return all;
}

TEST(VocabularyParallel, LooksUpWithoutACollective) {
  const testing::DebugChecks none("0");
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    const StrictScope strict;
    for (const std::int64_t rows : {8, 7, 9}) {
      for (const auto& c : bag_cases()) {
        const auto weight = distribute_tensor(table(rows), mesh, c.weight);
        const auto index = distribute_tensor(indices(), mesh, c.indices);
        const CommunicationScope communication(mesh);
        const DistributedTensor result(at::embedding(weight, index));
        EXPECT_EQ(communication.total().calls, 0);
        EXPECT_EQ(result.placements(), c.result);
        EXPECT_EQUAL(result, at::embedding(table(rows), indices()));
      }
    }
  });
}

TEST(VocabularyParallel, GradientHasTheLayoutOfTheWeight) {
  for (const std::int64_t rows : {8, 7}) {
    auto plain = table(rows).requires_grad_();
    at::embedding(plain, indices()).pow(2).sum().backward();
    RunOnMesh({2, 2}, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
      for (const auto& c : bag_cases()) {
        const auto weight = distribute_tensor(table(rows), mesh, c.weight).tensor().detach();
        weight.requires_grad_();
        const auto index = distribute_tensor(indices(), mesh, c.indices);
        const CommunicationScope communication(mesh);
        const auto result = at::embedding(weight, index);
        DistributedTensor(result)
            .redistribute({Replicate{}, Replicate{}})
            .tensor()
            .pow(2)
            .sum()
            .backward();
        const DistributedTensor gradient(weight.grad());
        EXPECT_EQ(gradient.placements(), c.weight);
        for (const auto& [key, traffic] : communication.table()) {
          EXPECT_LT(traffic.bytes, 2 * plain.numel() * 8) << key.first << " " << key.second;
        }
        EXPECT_CLOSE(gradient, plain.grad()) << to_string(c.weight);
      }
    });
  }
}

TEST_ON_MESH(VocabularyParallel, RefusesIndicesOutsideTheVocabulary, {2}, {"x"}) {
  const auto weight = distribute_tensor(table(5), mesh, {Shard{0}});
  for (const std::int64_t wrong : {5, -1}) {
    const auto index = distribute_tensor(at::tensor({wrong}), mesh, {Replicate{}});
    EXPECT_ERROR(at::embedding(weight, index), "outside the 5 rows");
  }
}

}  // namespace
}  // namespace tessera
