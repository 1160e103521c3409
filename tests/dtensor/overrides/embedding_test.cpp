// aten::embedding whose vocabulary is split.

#include "tessera/dtensor/communication_scope.h"
#include "testing/distributed.h"
#include "testing/environment.h"

namespace tessera {
namespace {

at::Tensor table(std::int64_t rows) {
  return at::arange(rows * 3, at::kDouble).view({rows, 3}).cos();
}

const at::Tensor& indices() {
  static const auto all = at::tensor({6, 0, 3, 3, 1, 6}, at::kLong).view({2, 3});
  return all;
}

struct Case {
  Placements weight, indices, result;
};

const std::vector<Case>& cases() {
  const Partial sum;
  const Replicate whole;
  static const std::vector<Case> all{
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
      for (const auto& c : cases()) {
        const auto weight = distribute_tensor(table(rows), mesh, c.weight);
        const auto index = distribute_tensor(indices(), mesh, c.indices);
        const CommunicationScope communication(mesh);
        const DistributedTensor result(at::embedding(weight, index));
        EXPECT_EQ(communication.total().calls, 0);
        EXPECT_EQ(result.placements(), c.result);
        EXPECT_TRUE(at::equal(result.full_tensor(), at::embedding(table(rows), indices())));
      }
    }
  });
}

TEST(VocabularyParallel, HasEmptyShards) {
  RunOnMesh({4}, {"x"}, [](const DeviceMesh& mesh) {
    const auto weight = distribute_tensor(table(2), mesh, {Shard{0}});
    const auto index = distribute_tensor(at::tensor({1, 0, 1}, at::kLong), mesh, {Replicate{}});
    const DistributedTensor result(at::embedding(weight, index));
    EXPECT_TRUE(at::equal(result.full_tensor(), table(2).index_select(0, at::tensor({1, 0, 1}))));
  });
}

TEST(VocabularyParallel, GradientLiesAsTheWeightAndGathersNothing) {
  for (const std::int64_t rows : {8, 7}) {
    auto plain = table(rows).requires_grad_();
    at::embedding(plain, indices()).pow(2).sum().backward();
    RunOnMesh({2, 2}, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
      for (const auto& c : cases()) {
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
        EXPECT_TRUE(at::allclose(gradient.full_tensor(), plain.grad())) << to_string(c.weight);
      }
    });
  }
}

TEST(VocabularyParallel, RefusesAnIndexThatNoShardHas) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const auto weight = distribute_tensor(table(5), mesh, {Shard{0}});
    for (const std::int64_t wrong : {5, -1}) {
      const auto index = distribute_tensor(at::tensor({wrong}), mesh, {Replicate{}});
      EXPECT_ERROR(at::embedding(weight, index), "outside the 5 rows");
    }
  });
}

}  // namespace
}  // namespace tessera
