#include "tessera/comm/trace.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::values;

at::Tensor leaf(const at::Tensor& value, const DeviceMesh& mesh, const Placements& placements) {
  return distribute_tensor(value, mesh, placements).tensor().detach().requires_grad_();
}

void expect_close(const at::Tensor& found, const at::Tensor& expected) {
  EXPECT_TRUE(at::allclose(found, expected, 1e-9, 1e-12)) << found << "\nexpected\n" << expected;
}

struct Mlp {
  at::Tensor up, down, norm;
  at::Tensor x;
};

Mlp plain_mlp(std::int64_t hidden) {
  return {values({hidden, 6}, 1).requires_grad_(), values({6, hidden}, 2).requires_grad_(),
          values({6}, 3).requires_grad_(), values({8, 6}, 4).requires_grad_()};
}

at::Tensor forward(const Mlp& m) {
  return at::silu(m.x.matmul(m.up.t())).matmul(m.down.t());
}

/// Column- then row-parallel: one reduction forward, one backward, hidden sizes that don't divide.
TEST(Strict, ColumnThenRowParallelReducesOnce) {
  const auto plain = plain_mlp(7);
  forward(plain).pow(2).sum().backward();
  RunOnMesh({4}, {"tp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    StrictScope strict;
    const Mlp m{leaf(plain.up.detach(), mesh, {Shard{0}}),
                leaf(plain.down.detach(), mesh, {Shard{1}}),
                {},
                leaf(plain.x.detach(), mesh, {Replicate{}})};
    const auto before = rank.world()->traffic().table();
    const DistributedTensor out(forward(m));
    EXPECT_EQ(out.placements(), Placements{Partial{}});
    const auto reduced = out.redistribute({Replicate{}});
    EXPECT_EQ(comm::total(rank.world()->traffic().since(before)).calls, 1);
    reduced.tensor().pow(2).sum().backward();
    // The other one: the gradient of x, partial until its leaf has it.
    EXPECT_EQ(comm::total(rank.world()->traffic().since(before)).calls, 2);
    expect_close(DistributedTensor(m.up.grad()).full_tensor(), plain.up.grad());
    expect_close(DistributedTensor(m.down.grad()).full_tensor(), plain.down.grad());
    expect_close(DistributedTensor(m.x.grad()).full_tensor(), plain.x.grad());
  });
}

TEST(Strict, RmsNormOnASplitSequenceCommunicatesForItsWeightAlone) {
  const auto plain = plain_mlp(4);
  at::rms_norm(plain.x, {6}, plain.norm, 1e-5).pow(2).sum().backward();
  RunOnMesh({4}, {"tp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    StrictScope strict;
    const auto x = leaf(plain.x.detach(), mesh, {Shard{0}});
    const auto weight = leaf(plain.norm.detach(), mesh, {Replicate{}});
    const auto before = rank.world()->traffic().table();
    const auto y = at::rms_norm(x, {6}, weight, 1e-5).pow(2);
    EXPECT_EQ(comm::total(rank.world()->traffic().since(before)).calls, 0);
    y.sum().backward();
    const auto table = rank.world()->traffic().since(before);
    EXPECT_EQ(comm::total(table).calls, 1);
    EXPECT_EQ(table.begin()->first.second, "all_reduce");
    expect_close(DistributedTensor(x.grad()).full_tensor(), plain.x.grad());
    expect_close(DistributedTensor(weight.grad()).full_tensor(), plain.norm.grad());
  });
}

TEST(Strict, RefusesHiddenCommunicationWithOperatorSpecsAndRemedy) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    StrictScope strict;
    const auto rows = distribute_tensor(values({4, 4}, 0), mesh, {Shard{0}});
    EXPECT_ERROR(at::softmax(rows.tensor(), 0), "aten::_softmax", "Shard(0)", "redistribute");
    // And the next collective still works.
    expect_close(rows.full_tensor(), values({4, 4}, 0));
  });
}

TEST(Strict, RefusesOperatorsWithoutARule) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    const auto square = distribute_tensor(values({4, 4}, 0), mesh, {Shard{0}});
    EXPECT_TRUE(at::equal(DistributedTensor(at::nonzero(square)).full_tensor(),
                          at::nonzero(values({4, 4}, 0))));
    StrictScope strict;
    EXPECT_ERROR(at::nonzero(square.tensor()), "aten::nonzero has no sharding rule for");
  });
}

TEST(Strict, AllowsReadingOneValue) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    StrictScope strict;
    const auto rows = distribute_tensor(at::ones({5}), mesh, {Shard{0}});
    EXPECT_EQ(rows.tensor().sum().item<float>(), 5);
    EXPECT_TRUE(rows.tensor().sum().is_nonzero());
  });
}

TEST(Policy, CountsImplicitRedistributions) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    const auto rows = distribute_tensor(values({4, 4}, 0), mesh, {Shard{0}});
    const auto before = implicit_redistributions();
    at::exp(rows.tensor());
    EXPECT_EQ(implicit_redistributions(), before);
    at::softmax(rows.tensor(), 0);
    EXPECT_EQ(implicit_redistributions(), before + 1);
  });
}

TEST(Policy, RefusesPlainTensorsUnlessVouchedFor) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    const at::Tensor rows = distribute_tensor(values({4, 4}, 0), mesh, {Shard{0}});
    EXPECT_ERROR(rows + values({4, 4}, 1), "mixes distributed tensors with plain ones",
                 "argument 0, [4, 4] on (tp=2) as [Shard(0)]; argument 1, [4, 4], is plain):",
                 "distribute those first", "ReplicationScope");
    EXPECT_ERROR(at::cat({values({4, 4}, 1), rows}), "(argument 0[0], [4, 4], is plain;",
                 "argument 0[1], [4, 4] on (tp=2)");
    EXPECT_NO_THROW(rows + 1);
    ReplicationScope replicated;
    expect_close(DistributedTensor(rows + values({4, 4}, 1)).full_tensor(),
                 values({4, 4}, 0) + values({4, 4}, 1));
  });
}

TEST(Policy, RefusesTwoMeshesInOneOperator) {
  RunRanks(2, [](Rank& rank) {
    const at::Tensor a = distribute_tensor(at::ones({4}), rank.mesh({2}, {"a"}), {Shard{0}});
    const at::Tensor b = distribute_tensor(at::ones({4}), rank.mesh({2}, {"b"}), {Shard{0}});
    EXPECT_ERROR(a + b, "on different meshes");
  });
}

TEST(Failure, OnOneRankEndsTheOthers) {
  const auto errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    const auto mesh = rank.mesh({2}, {"a"});
    const auto t = distribute_tensor(at::ones({4}), mesh, {Shard{0}});
    t.full_tensor();
    if (rank.rank() == 1) {
      fail("lost");
    }
    t.full_tensor();
  });
  EXPECT_EQ(errors[1], "lost");
  EXPECT_CONTAINS(errors[0], "all_gather in group", "look for");
}

}  // namespace
}  // namespace tessera
