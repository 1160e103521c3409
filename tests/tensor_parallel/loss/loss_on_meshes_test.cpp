// The loss of logits whose tokens and vocabulary lie on a mesh in any way, against libtorch's
// loss of the whole logits, in fp64.

#include "tessera/tensor_parallel/loss_parallel.h"
#include "testing/distributed.h"

namespace tessera::tensor_parallel {
namespace {

constexpr std::int64_t kMeshTokens = 7, kMeshVocabulary = 11;

at::Tensor mesh_logits() {
  return testing::uniform_values({kMeshTokens, kMeshVocabulary}, 3).to(at::kDouble).mul(4);
}

at::Tensor mesh_targets() {
  const at::Tensor targets =
      at::arange(kMeshTokens, at::kLong).mul(3).add(1).remainder(kMeshVocabulary);
  targets[2] = -100;
  return targets;
}

struct WholeLoss {
  at::Tensor loss, gradient;
};

/// The loss of the whole logits, weighted by `of_row` for kNone.
WholeLoss loss_of_one_rank(const CrossEntropyOptions& options, const at::Tensor& of_row) {
  const at::Tensor leaf = mesh_logits().requires_grad_();
  const at::Tensor targets = mesh_targets();
  at::Tensor losses =
      at::cross_entropy_loss(leaf, targets, {}, at::Reduction::None, -100, options.label_smoothing);
  losses = losses + leaf.logsumexp(1).square().masked_fill(targets.eq(-100), 0) * options.z_loss;
  const at::Tensor loss = options.reduction == Reduction::kNone ? losses
                          : options.reduction == Reduction::kSum
                              ? losses.sum()
                              : losses.sum() / targets.ne(-100).sum();
  (options.reduction == Reduction::kNone ? (loss * of_row).sum() : loss).backward();
  return {loss.detach(), leaf.grad()};
}

struct MeshCase {
  std::vector<std::int64_t> mesh;
  Placements logits, targets;  ///< no targets' placements: plain
};

class LossOnMeshes : public ::testing::TestWithParam<MeshCase> {};

void expect_loss_of_one_rank(Rank& rank, const MeshCase& param,
                             const CrossEntropyOptions& options) {
  const at::Tensor of_row = at::arange(1, kMeshTokens + 1, at::kDouble);
  const WholeLoss expected = loss_of_one_rank(options, of_row);
  const DeviceMesh mesh = rank.mesh(param.mesh, {"dp", "tp"});
  const at::Tensor logits =
      distribute_tensor(mesh_logits(), mesh, param.logits).tensor().detach().requires_grad_();
  const at::Tensor targets = param.targets.empty()
                                 ? mesh_targets()
                                 : distribute_tensor(mesh_targets(), mesh, param.targets).tensor();
  const StrictScope strict;
  const at::Tensor loss = cross_entropy(logits, targets, options);
  const at::Tensor whole =
      tessera::is_distributed(loss) ? DistributedTensor(loss).full_tensor() : loss;
  const bool rows = options.reduction == Reduction::kNone;
  (rows ? (whole * of_row).sum() : whole).backward();

  EXPECT_TRUE(whole.allclose(expected.loss, 0, 1e-12)) << whole << expected.loss;
  const DistributedTensor gradient(logits.grad());
  EXPECT_EQ(gradient.layout(), DistributedTensor(logits).layout());
  EXPECT_TRUE(gradient.full_tensor().allclose(expected.gradient, 0, 1e-12));
}

TEST_P(LossOnMeshes, EqualsTheLossOfOneRank) {
  const MeshCase& param = GetParam();
  RunRanks(testing::ranks_of(param.mesh), [&](Rank& rank) {
    for (const CrossEntropyOptions& options :
         {CrossEntropyOptions{}, CrossEntropyOptions{.reduction = Reduction::kSum},
          CrossEntropyOptions{.reduction = Reduction::kNone},
          CrossEntropyOptions{.label_smoothing = 0.2, .z_loss = 0.03},
          CrossEntropyOptions{.reduction = Reduction::kSum, .label_smoothing = 1, .z_loss = 0.5}}) {
      expect_loss_of_one_rank(rank, param, options);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Placements, LossOnMeshes,
    ::testing::Values(
        MeshCase{{2, 2}, {Shard{0}, Shard{1}}, {}},
        MeshCase{{2, 2}, {Shard{0}, Shard{1}}, {Shard{0}, Replicate{}}},
        MeshCase{{2, 2}, {Shard{0}, Shard{1}}, {Replicate{}, Shard{0}}},  // as other ranks' rows
        MeshCase{{2, 2}, {Shard{1}, Shard{0}}, {}}, MeshCase{{2, 2}, {Shard{1}, Shard{1}}, {}},
        MeshCase{{2, 2}, {Shard{0}, Shard{0}}, {Shard{0}, Shard{0}}},
        MeshCase{{2, 2}, {Replicate{}, Shard{1}}, {}},
        MeshCase{{2, 2}, {Replicate{}, Shard{1}}, {Replicate{}, Replicate{}}},
        MeshCase{{2, 2}, {Replicate{}, Shard{1}}, {Shard{0}, Shard{0}}},  // gathered
        MeshCase{{2, 2}, {Replicate{}, Replicate{}}, {}},
        MeshCase{{1, 4}, {Shard{0}, Shard{1}}, {}}, MeshCase{{3, 1}, {Shard{0}, Shard{1}}, {}},
        MeshCase{{2, 3}, {Shard{1}, Shard{1}}, {}}));  // a rank without columns

TEST(LossOnMeshes, MeansOverTheTokensOfAllRanksIfSomeIgnoreAll) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    const at::Tensor targets = mesh_targets();
    targets.narrow(0, 4, 3).fill_(-100);
    const at::Tensor logits = distribute_tensor(mesh_logits(), mesh, {Shard{0}}).tensor();
    const at::Tensor expected = cross_entropy(mesh_logits(), targets);
    EXPECT_TRUE(cross_entropy(logits, targets).allclose(expected, 0, 1e-12));
  });
}

// Plain targets are refused by all ranks in the same words, distributed ones by those that have
// them.
TEST(LossOnMeshes, EndsEveryRankForATargetInTheRowsOfOne) {
  for (const bool distributed : {false, true}) {
    const auto errors = testing::ErrorsOfRanks(2, [&](Rank& rank) {
      const DeviceMesh mesh = rank.mesh({2}, {"dp"});
      at::Tensor targets = mesh_targets();
      targets[kMeshTokens - 1] = kMeshVocabulary;
      if (distributed) {
        targets = distribute_tensor(targets, mesh, {Shard{0}}).tensor();
      }
      cross_entropy(distribute_tensor(mesh_logits(), mesh, {Shard{0}}).tensor(), targets);
    });
    EXPECT_CONTAINS(errors[1], "a target is outside the vocabulary [0, 11)");
    EXPECT_CONTAINS(errors[0], distributed ? "rank 1" : "a target is outside the vocabulary");
  }
}

TEST(LossOnMeshes, RefusesLayoutsThatHaveNoLoss) {
  RunOnMesh({2}, {"tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const at::Tensor terms = distribute_tensor(mesh_logits(), mesh, {Partial{}}).tensor();
    EXPECT_ERROR(cross_entropy(terms, mesh_targets()), "redistribute them to Shard(1)");
    const at::Tensor even = mesh_logits().narrow(1, 0, 8);
    const at::Tensor parts = distribute_tensor(even, mesh, {StridedShard{1, 2}}).tensor();
    EXPECT_ERROR(cross_entropy(parts, mesh_targets().remainder(8)), "are not consecutive");
    const at::Tensor targets = distribute_tensor(mesh_targets(), mesh, {Shard{0}}).tensor();
    EXPECT_ERROR(cross_entropy(mesh_logits(), targets), "pass full_tensor()");
    const DeviceMesh other = rank.mesh({2, 1}, {"a", "b"});
    const at::Tensor columns = distribute_tensor(mesh_logits(), other, {Shard{1}, Replicate{}});
    EXPECT_ERROR(cross_entropy(columns, targets), "pass full_tensor()");
  });
}

}  // namespace
}  // namespace tessera::tensor_parallel
