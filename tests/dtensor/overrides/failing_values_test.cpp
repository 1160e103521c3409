
#include "tessera/dtensor/communication_scope.h"
#include "testing/distributed.h"
#include "testing/environment.h"

namespace tessera {

// Tests operators that throw for values which only one rank has. With TESSERA_DEBUG=1, all ranks
// must throw, and later collectives must still match between the ranks.

namespace {

using testing::values;
using Tensors = std::vector<at::Tensor>;

constexpr int kRanks = 4;
constexpr int kBadRank = 2;

struct BadCase {
  const char* name;
  const char* operator_name;
  at::Tensor numbers;  ///< `numbers`: a row per rank; row kBadRank is invalid
  std::function<at::Tensor(const at::Tensor& numbers, const DeviceMesh&)> run;
};

at::Tensor indices(std::int64_t bad) {
  auto rows = at::arange(8).view({4, 2});
  rows[kBadRank][1] = bad;
  return rows;
}

at::Tensor on(const DeviceMesh& mesh, const at::Tensor& tensor, const Placement& placement) {
  return distribute_tensor(tensor, mesh, {placement}).tensor().detach();
}

std::vector<BadCase> bad_cases() {
  return {
      {"embedding", "embedding", indices(10),
       [](auto& i, auto& mesh) {
         return at::embedding(on(mesh, values({10, 3}), Replicate{}), i);
       }},
      {"gather", "gather", indices(10),
       [](auto& i, auto& mesh) { return on(mesh, values({4, 10}), Shard{0}).gather(1, i); }},
      {"index_select", "index_select", indices(10),
       [](auto& i, auto& mesh) {
         return on(mesh, values({10, 3}), Replicate{}).index_select(0, i.select(1, 1));
       }},
      {"index", "index", indices(-11),
       [](auto& i, auto& mesh) { return at::index(on(mesh, values({10, 3}), Replicate{}), {i}); }},
      {"scatter", "scatter", indices(10),
       [](auto& i, auto& mesh) { return on(mesh, values({4, 10}), Shard{0}).scatter(1, i, 1.5); }},
      {"scatter_add_", "scatter_add_", indices(10),
       [](auto& i, auto& mesh) {
         return on(mesh, values({4, 10}), Shard{0})
             .scatter_add_(1, i, on(mesh, values({4, 2}), Shard{0}));
       }},
      {"nll_loss", "nll_loss_forward", indices(10),
       [](auto& i, auto& mesh) {
         return at::nll_loss(on(mesh, values({4, 10}), Shard{0}), i.select(1, 1));
       }},
      {"cross_entropy_loss", "nll_loss", indices(10),
       [](auto& i, auto& mesh) {
         const auto logits = on(mesh, values({4, 10}), Shard{0}).requires_grad_();
         return at::cross_entropy_loss(logits, i.select(1, 1), {}, at::Reduction::Sum);
       }},
  };
}

/// Expects an error from `call` that names the operator and rank 2, and that tells what to correct.
void expect_failure(const std::function<void()>& call, const std::string& name) {
  EXPECT_ERROR(call(), name, "failed on rank 2", "correct");
}

void expect_in_step(const DeviceMesh& mesh) {
  EXPECT_EQ(on(mesh["x"], at::ones({8}), Shard{0}).sum().item<float>(), 8);
}

TEST(InvalidValue, FailsTheCallOnAllRanks) {
  const testing::DebugChecks debug("1");
  RunOnMesh({kRanks}, {"x"}, [](const DeviceMesh& mesh) {
    for (const BadCase& c : bad_cases()) {
      SCOPED_TRACE(c.name);
      const at::Tensor numbers = on(mesh, c.numbers, Shard{0});
      for (int i = 0; i < 2; ++i) {  // the second call uses the dispatch cache
        expect_failure([&] { c.run(numbers, mesh); }, c.operator_name);
        expect_in_step(mesh);
      }
    }
  });
}

// All ranks must throw, even a rank whose rows are valid.
TEST(InvalidValue, InAShardedVocabularyFailsOnAllRanks) {
  const testing::DebugChecks debug("1");
  RunRanks(kRanks, [](Rank& rank) {
    const auto mesh = rank.mesh({2, 2}, {"dp", "x"});
    const at::Tensor weight = distribute_tensor(values({10, 3}), mesh, {Replicate{}, Shard{0}});
    const at::Tensor rows = distribute_tensor(indices(10), mesh, {Shard{0}, Replicate{}});
    expect_failure([&] { at::embedding(weight, rows); }, "embedding");
    expect_in_step(mesh);
  });
}

TEST(InvalidValue, IsCheckedOnlyInDebugMode) {
  const testing::DebugChecks none("0");
  RunOnMesh({2}, {"x"}, [](Rank& rank, const DeviceMesh& mesh) {
    const auto weight = on(mesh, values({10, 3}), Replicate{});
    const auto rows = on(mesh, at::arange(4), Shard{0});
    const CommunicationScope communication(mesh);
    EXPECT_TRUE(at::equal(DistributedTensor(at::embedding(weight, rows)).to_local(),
                          values({10, 3}).slice(0, 2 * rank.rank(), 2 * rank.rank() + 2)));
    EXPECT_EQ(communication.total().calls, 0);
  });
}

TEST(ValidIndices, PassTheCheck) {
  const testing::DebugChecks debug("1");
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const auto weight = on(mesh, values({10, 3}), Replicate{}).requires_grad_();
    const at::Tensor found = at::embedding(weight, on(mesh, at::arange(5), Shard{0}));
    EXPECT_EQUAL(found.detach(), values({10, 3}).slice(0, 0, 5));
    found.sum().backward();
    EXPECT_EQ(DistributedTensor(weight.grad()).full_tensor().sum().item<double>(), 15);
  });
}

TEST(PlainTensors, InAReplicationScopeAreComparedBetweenRanks) {
  const testing::DebugChecks debug("1");
  RunOnMesh({2}, {"x"}, [](Rank& rank, const DeviceMesh& mesh) {
    const auto x = on(mesh, values({4, 3}), Shard{0});
    const ReplicationScope plain_ones_are_equal;
    for (int i = 0; i < 2; ++i) {
      const auto unequal = at::arange(3, at::kDouble).add(rank.rank());
      EXPECT_ERROR(x.mul(unequal), "on ranks 1");
      const auto equal = at::arange(6, at::kDouble).view({3, 2}).t()[1];
      EXPECT_EQUAL(x.mul(equal), values({4, 3}).mul(at::tensor({1, 3, 5})));
    }
  });
}

TEST(PlainTensors, ThatAreOnlyWrittenAreNotCompared) {
  const testing::DebugChecks debug("1");
  RunRanks(2, [](Rank& rank) {
    const auto x = on(rank.mesh({2}, {"x"}), values({4, 3}), Shard{0});
    const ReplicationScope plain_ones_are_equal;
    auto result = at::full({3}, rank.rank() + 1.0, at::kDouble);
    at::sum_out(result, x, 0);
    EXPECT_TRUE(at::allclose(result, values({4, 3}).sum(0)));
    auto unequal = at::full({3}, rank.rank() + 1.0, at::kDouble);
    EXPECT_ERROR(unequal.add_(x.sum(0)), "on ranks 1");
  });
}

}  // namespace
}  // namespace tessera
