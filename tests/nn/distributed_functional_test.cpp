#include "tessera/nn/functional.h"
#include "testing/distributed.h"

namespace tessera::nn {
namespace {

using testing::full_tensor;
using testing::normal_values;

DistributedTensor spread(const at::Tensor& tensor, const DeviceMesh& mesh,
                         const Placements& placements) {
  return distribute_tensor(tensor.detach().clone(), mesh, placements);
}

at::Tensor leaf(const DistributedTensor& tensor) {
  return tensor.tensor().detach().requires_grad_();
}

/// The calls that `body` makes on the wire.
template <class Body>
std::int64_t calls(Rank& rank, Body&& body) {
  const auto before = rank.world()->traffic().table();
  body();
  return comm::total(rank.world()->traffic().since(before)).calls;
}

// 7 rows over 4 ranks, 3 rows (an empty shard), and one row over 2 x 2.
TEST(DistributedRmsNorm, WorksOnShardedRows) {
  for (const std::int64_t rows : {7, 3, 1}) {
    RunOnMesh({4}, {"tp"}, [&](const DeviceMesh& mesh) {
      const at::Tensor x0 = normal_values({rows, 10}, 1).requires_grad_();
      const at::Tensor w0 = normal_values({10}, 2).requires_grad_();
      const at::Tensor grad = normal_values({rows, 10}, 3);
      const at::Tensor y0 = at::rms_norm(x0, {10}, w0, 1e-5);
      y0.backward(grad);
      const at::Tensor x = leaf(spread(x0, mesh, {Shard{0}}));
      const at::Tensor w = leaf(spread(w0, mesh, {Replicate{}}));
      const at::Tensor y = rms_norm(x, w, 1e-5);
      EXPECT_EQ(DistributedTensor(y).placements(), Placements{Shard{0}});
      EXPECT_TRUE(full_tensor(y).allclose(y0.detach(), 1e-5, 1e-6));
      y.backward(spread(grad, mesh, {Shard{0}}).tensor());
      EXPECT_TRUE(full_tensor(x.grad()).allclose(x0.grad(), 1e-4, 1e-5));
      EXPECT_TRUE(full_tensor(w.grad()).allclose(w0.grad(), 1e-4, 1e-5));
    });
  }
}

TEST(DistributedRmsNorm, DoesNotCommunicate) {
  RunOnMesh({2}, {"tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const at::Tensor x = leaf(spread(normal_values({6, 4}, 1), mesh, {Shard{0}}));
    const at::Tensor w = leaf(spread(normal_values({4}, 2), mesh, {Replicate{}}));
    const at::Tensor grad = spread(normal_values({6, 4}, 3), mesh, {Shard{0}}).tensor();
    leave_gradient_pending(w);
    EXPECT_EQ(calls(rank, [&] { rms_norm(x, w, 1e-5).backward(grad); }), 0);
    EXPECT_EQ(DistributedTensor(w.grad()).placements(), Placements{Partial{}});
  });
}

TEST(DistributedRmsNorm, GathersASplitLastDimension) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    const at::Tensor x0 = normal_values({6, 4}, 1);
    const at::Tensor x = spread(x0, mesh, {Shard{1}}).tensor();
    EXPECT_TRUE(full_tensor(rms_norm(x, {}, 1e-5)).equal(rms_norm(x0, {}, 1e-5)));
    const StrictScope strict;
    EXPECT_ERROR(rms_norm(x, {}, 1e-5), "tessera::rms_norm needs its inputs redistributed");
  });
}

TEST(DistributedRmsNorm, RefusesPlainTensorsBesideDistributedOnes) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    const at::Tensor x = spread(normal_values({6, 4}, 1), mesh, {Shard{0}}).tensor();
    EXPECT_ERROR(rms_norm(x, at::ones({4}), 1e-5), "argument 1, [4], is plain");
    const at::Tensor weight = spread(at::ones({4}), mesh, {Replicate{}}).tensor();
    EXPECT_ERROR(rms_norm(at::ones({6, 4}), weight, 1e-5), "argument 0, [6, 4], is plain");
    const ReplicationScope same_on_every_rank;
    EXPECT_TRUE(full_tensor(rms_norm(x, at::ones({4}), 1e-5))
                    .equal(rms_norm(normal_values({6, 4}, 1), at::ones({4}), 1e-5)));
  });
}

/// As of a model whose first block has a plain input.
TEST(DistributedRmsNorm, AddsAPlainResidualThatEveryRankHas) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    const at::Tensor x0 = normal_values({6, 4}, 1).requires_grad_(),
                     residual0 = normal_values({6, 4}, 2).requires_grad_(),
                     w0 = normal_values({4}, 3).requires_grad_();
    const auto loss = [](const at::Tensor& x, const at::Tensor& residual, const at::Tensor& w) {
      const auto [normed, sum] = add_rms_norm(x, residual, w, 1e-5);
      return (normed * sum).sum();
    };
    loss(x0, residual0, w0).backward();
    const ReplicationScope same_on_every_rank;
    for (const Placement& placement : {Placement{Shard{0}}, Placement{Replicate{}}}) {
      const at::Tensor x = leaf(spread(x0.detach(), mesh, {placement}));
      const at::Tensor w = leaf(spread(w0.detach(), mesh, {Replicate{}}));
      const at::Tensor residual = residual0.detach().clone().requires_grad_();
      loss(x, residual, w).backward();
      EXPECT_TRUE(full_tensor(x.grad()).allclose(x0.grad(), 1e-4, 1e-5));
      EXPECT_FALSE(tessera::is_distributed(residual.grad()));
      EXPECT_TRUE(residual.grad().allclose(residual0.grad(), 1e-4, 1e-5));
      EXPECT_TRUE(full_tensor(w.grad()).allclose(w0.grad(), 1e-4, 1e-5));
    }
  });
}

TEST(DistributedSiluMul, WorksOnAnySharding) {
  for (const Placement& placement :
       {Placement{Shard{0}}, Placement{Shard{1}}, Placement{Replicate{}}}) {
    RunOnMesh({3}, {"tp"}, [&](const DeviceMesh& mesh) {
      const at::Tensor a0 = normal_values({5, 7}, 1).requires_grad_();
      const at::Tensor b0 = normal_values({5, 7}, 2).requires_grad_();
      const at::Tensor grad = normal_values({5, 7}, 3);
      const at::Tensor y0 = at::silu(a0) * b0;
      y0.backward(grad);
      const at::Tensor a = leaf(spread(a0, mesh, {placement}));
      const at::Tensor b = leaf(spread(b0, mesh, {placement}));
      const at::Tensor y = silu_mul(a, b);
      y.backward(spread(grad, mesh, {placement}).tensor());
      EXPECT_TRUE(full_tensor(y).allclose(y0.detach(), 1e-5, 1e-6));
      EXPECT_TRUE(full_tensor(a.grad()).allclose(a0.grad(), 1e-5, 1e-6));
      EXPECT_TRUE(full_tensor(b.grad()).allclose(b0.grad(), 1e-5, 1e-6));
    });
  }
}

TEST(DistributedSiluMul, BringsOperandsOfDifferentLayoutsTogether) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    const at::Tensor x = normal_values({4, 4}, 1);
    const at::Tensor rows = spread(x, mesh, {Shard{0}}).tensor();
    const at::Tensor columns = spread(x, mesh, {Shard{1}}).tensor();
    const at::Tensor pending = spread(x, mesh, {Partial{}}).tensor();
    for (const auto& operands : {std::pair(rows, columns), std::pair(pending, pending)}) {
      const at::Tensor result = silu_mul(operands.first, operands.second);
      EXPECT_TRUE(full_tensor(result).allclose(silu_mul(x, x), 1e-6, 1e-6));
      const StrictScope strict;
      EXPECT_ERROR(silu_mul(operands.first, operands.second),
                   "tessera::silu_mul needs its inputs redistributed");
    }
    EXPECT_ERROR(silu_mul(rows, x), "tessera::silu_mul mixes distributed tensors with plain ones");
  });
}

TEST(DistributedSiluMul, RefusesOtherSizesOnEveryLayout) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    const at::Tensor a = spread(at::ones({2, 4}), mesh, {Shard{0}}).tensor();
    const at::Tensor b = spread(at::ones({4, 4}), mesh, {Shard{0}}).tensor();
    EXPECT_ERROR(silu_mul(a, b), "of sizes [2, 4] and [4, 4]");
  });
}

TEST(DistributedSiluMul, RedistributesAGradientThatLiesOtherwise) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    const at::Tensor a = leaf(spread(normal_values({4, 4}, 1), mesh, {Shard{0}}));
    const at::Tensor b = leaf(spread(normal_values({4, 4}, 2), mesh, {Shard{0}}));
    silu_mul(a, b).backward(spread(at::ones({4, 4}), mesh, {Replicate{}}).tensor());
    EXPECT_EQ(DistributedTensor(a.grad()).placements(), Placements{Shard{0}});
    EXPECT_TRUE(full_tensor(b.grad()).allclose(at::silu(normal_values({4, 4}, 1)), 1e-5, 1e-6));
  });
}

TEST(DistributedRotaryEmbedding, WorksOnSplitHeads) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    const at::Tensor x0 = normal_values({2, 5, 3, 4}, 1);
    const at::Tensor cos = normal_values({5, 4}, 2);
    const at::Tensor sin = normal_values({5, 4}, 3);
    const at::Tensor x = leaf(spread(x0, mesh, {Shard{2}}));
    EXPECT_ERROR(rotary_embedding(x, cos, sin), "argument 1, [5, 4], is plain");
    const ReplicationScope same_on_every_rank;
    const at::Tensor y = rotary_embedding(x, cos, sin);
    EXPECT_TRUE(full_tensor(y).allclose(rotary_embedding(x0, cos, sin)));
    y.backward(spread(x0, mesh, {Shard{2}}).tensor());
    const at::Tensor plain = x0.clone().requires_grad_();
    rotary_embedding(plain, cos, sin).backward(x0);
    EXPECT_TRUE(full_tensor(x.grad()).allclose(plain.grad()));
  });
}

// Each rank turns its positions by its rows of the tables, which are cut without communication.
TEST(DistributedRotaryEmbedding, WorksOnASplitSequence) {
  RunOnMesh({2, 2}, {"cp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const at::Tensor x0 = normal_values({2, 5, 3, 4}, 1);
    const at::Tensor cos = normal_values({5, 4}, 2), sin = normal_values({5, 4}, 3);
    const at::Tensor x = spread(x0, mesh, {Shard{1}, Shard{2}}).tensor();
    const ReplicationScope same_on_every_rank;
    at::Tensor y;
    EXPECT_EQ(calls(rank, [&] { y = rotary_embedding(x, cos, sin); }), 0);
    EXPECT_TRUE(full_tensor(y).equal(rotary_embedding(x0, cos, sin)));
  });
}

TEST(DistributedRotaryEmbedding, RefusesTablesThatNeedAGradient) {
  const at::Tensor x = at::ones({1, 2, 1, 4}), table = at::ones({2, 4});
  EXPECT_ERROR(rotary_embedding(x, table.clone().requires_grad_(), table), "need no gradient");
}

struct Vocabulary {
  std::int64_t rows;
  Placement weight;
  Placement out;
};

// Vocabularies that divide, do not, and leave ranks without a row; and a split hidden dimension.
TEST(DistributedEmbedding, AgreesWithOneRank) {
  for (const Vocabulary& v :
       {Vocabulary{8, Shard{0}, Partial{}}, Vocabulary{9, Shard{0}, Partial{}},
        Vocabulary{2, Shard{0}, Partial{}}, Vocabulary{9, Shard{1}, Shard{2}},
        Vocabulary{9, Replicate{}, Replicate{}}}) {
    RunOnMesh({4}, {"tp"}, [&](const DeviceMesh& mesh) {
      const at::Tensor w0 = normal_values({v.rows, 6}, 1).requires_grad_();
      const at::Tensor indices = at::arange(10, at::kLong).remainder(v.rows).view({2, 5});
      const at::Tensor grad = normal_values({2, 5, 6}, 2);
      at::embedding(w0, indices).backward(grad);
      const at::Tensor w = leaf(spread(w0, mesh, {v.weight}));
      EXPECT_ERROR(nn::embedding(w, indices), "argument 1, [2, 5], is plain",
                   "state in a ReplicationScope");
      const ReplicationScope same_on_every_rank;
      const at::Tensor y = nn::embedding(w, indices);
      EXPECT_EQ(DistributedTensor(y).placements(), Placements{v.out});
      EXPECT_TRUE(full_tensor(y).equal(at::embedding(w0, indices).detach()));
      const Placement grad_placement = is_partial(v.out) ? Placement{Replicate{}} : v.out;
      y.backward(spread(grad, mesh, {grad_placement}).tensor());
      EXPECT_EQ(DistributedTensor(w.grad()).placements(), Placements{v.weight});
      EXPECT_TRUE(full_tensor(w.grad()).allclose(w0.grad(), 1e-6, 1e-6));
    });
  }
}

TEST(DistributedEmbedding, TakesSplitIndicesOnAnotherMeshDimension) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    const at::Tensor w0 = normal_values({7, 6}, 1).requires_grad_();
    const at::Tensor indices = at::tensor({0, 3, 6, 3, 1}, at::kLong);
    const at::Tensor grad = normal_values({5, 6}, 2);
    at::embedding(w0, indices).backward(grad);
    const at::Tensor w = leaf(spread(w0, mesh, {Replicate{}, Shard{0}}));
    const at::Tensor split = distribute_tensor(indices, mesh, {Shard{0}, Replicate{}}).tensor();
    const at::Tensor y = nn::embedding(w, split);
    EXPECT_EQ(DistributedTensor(y).placements(), (Placements{Shard{0}, Partial{}}));
    EXPECT_TRUE(full_tensor(y).equal(at::embedding(w0, indices).detach()));
    y.backward(spread(grad, mesh, {Shard{0}, Replicate{}}).tensor());
    EXPECT_TRUE(full_tensor(w.grad()).allclose(w0.grad(), 1e-6, 1e-6));
  });
}

TEST(DistributedEmbedding, GathersTheSmallerOfTableAndIndicesThatAreSplitTogether) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    const at::Tensor w0 = normal_values({7, 6}, 1).requires_grad_();
    const at::Tensor places = at::arange(4, at::kLong);
    at::embedding(w0, places).sum().backward();
    const at::Tensor w = leaf(spread(w0, mesh, {Shard{0}}));
    const at::Tensor indices = distribute_tensor(places, mesh, {Shard{0}}).tensor();
    const at::Tensor y = nn::embedding(w, indices);
    EXPECT_EQ(DistributedTensor(y).placements(), Placements{Partial{}});
    EXPECT_TRUE(full_tensor(y).equal(at::embedding(w0, places).detach()));
    y.sum().backward();
    EXPECT_EQ(DistributedTensor(w.grad()).placements(), Placements{Shard{0}});
    EXPECT_TRUE(full_tensor(w.grad()).equal(w0.grad()));
    const StrictScope strict;
    EXPECT_ERROR(nn::embedding(w, indices), "tessera::embedding needs its inputs redistributed");
  });
}

TEST(DistributedEmbedding, LeavesTheGradientOfATablePending) {
  RunOnMesh({2}, {"dp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const at::Tensor w = leaf(spread(normal_values({7, 6}, 1), mesh, {Replicate{}}));
    leave_gradient_pending(w);
    const at::Tensor indices =
        distribute_tensor(at::arange(5, at::kLong), mesh, {Shard{0}}).tensor();
    const at::Tensor grad = spread(normal_values({5, 6}, 2), mesh, {Shard{0}}).tensor();
    EXPECT_EQ(calls(rank, [&] { nn::embedding(w, indices).backward(grad); }), 0);
    EXPECT_EQ(DistributedTensor(w.grad()).placements(), Placements{Partial{}});
  });
}

// An index out of range is found by every rank, also by those that have no such row.
TEST(DistributedEmbedding, NamesAnIndexOutOfRangeOnEveryRank) {
  const auto errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2}, {"tp"});
    const at::Tensor w = spread(normal_values({7, 6}, 1), mesh, {Shard{0}}).tensor();
    const ReplicationScope same_on_every_rank;
    nn::embedding(w, at::tensor({0, 7}, at::kLong));
  });
  for (const std::string& error : errors) {
    EXPECT_CONTAINS(error, "index 7");
  }
}

TEST(DistributedDropout, IsTheSameOnEveryMesh) {
  const at::Tensor x0 = normal_values({7, 6}, 1);
  const at::Tensor expected = nn::dropout(x0, 0.5, {3, 4});
  for (const Placement& placement :
       {Placement{Shard{0}}, Placement{Shard{1}}, Placement{Replicate{}}}) {
    RunOnMesh({4}, {"tp"}, [&](const DeviceMesh& mesh) {
      const at::Tensor x = leaf(spread(x0, mesh, {placement}));
      const at::Tensor y = nn::dropout(x, 0.5, {3, 4});
      EXPECT_TRUE(full_tensor(y).equal(expected));
      y.backward(spread(at::ones({7, 6}), mesh, {placement}).tensor());
      EXPECT_TRUE(full_tensor(x.grad()).equal((expected != 0) * 2.0F));
    });
  }
}

}  // namespace
}  // namespace tessera::nn
