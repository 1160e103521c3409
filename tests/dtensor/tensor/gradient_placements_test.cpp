// Where a program crosses between plain and distributed tensors it says how gradients lie.

#include "tessera/comm/communicator.h"
#include "tessera/dtensor/communication_scope.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::values;

TEST(GradientPlacements, AReplicatedLocalTensorMayTakeItsTermAlone) {
  auto plain = values({3, 4}).requires_grad_();
  at::mm(plain, values({4, 5})).pow(2).sum().backward();
  RunOnMesh({2}, {"x"}, [&](const DeviceMesh& mesh) {
    const at::Tensor columns = distribute_tensor(values({4, 5}), mesh, {Shard{1}});
    const auto local = values({3, 4}).requires_grad_();
    const auto x =
        DistributedTensor::from_local(local, mesh, {Replicate{}}, {}, Placements{Partial{}});
    const auto loss = at::mm(x, columns).pow(2).sum();
    const CommunicationScope communication(mesh);
    loss.backward();
    EXPECT_EQ(communication.total().calls, 0);
    auto sum = local.grad().clone();
    mesh.group().all_reduce(sum, ReduceOp::kSum)->wait();
    EXPECT_TRUE(at::allclose(sum, plain.grad()));
    EXPECT_FALSE(at::allclose(local.grad(), plain.grad()));
  });
}

TEST(GradientPlacements, AFullTensorsGradientMayBePartial) {
  RunOnMesh({3}, {"x"}, [](Rank& rank, const DeviceMesh& mesh) {
    const auto leaf = distribute_tensor(values({4, 2}), mesh, {Shard{0}}).tensor().detach();
    leaf.requires_grad_();
    const auto whole = DistributedTensor(leaf).full_tensor(Placements{Partial{}});
    whole.mul(rank.rank() + 1).sum().backward();
    const DistributedTensor gradient(leaf.grad());
    EXPECT_EQ(gradient.placements(), Placements{Shard{0}});
    EXPECT_TRUE(at::equal(gradient.full_tensor(), at::full({4, 2}, 6.0, at::kDouble)));
  });
}

TEST(GradientPlacements, MustHavePartsOfTheSizeThatIsHandedOut) {
  const auto errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    const DistributedTensor columns =
        distribute_tensor(values({4, 4}), rank.mesh({2}, {"x"}), {Shard{1}});
    columns.to_local(Placements{Shard{0}});
  });
  EXPECT_CONTAINS(errors,
                  "to_local: gradients of a [4, 2] part cannot be [Shard(0)] of [4, 4]; name "
                  "placements with parts of that size");
  RunOnMesh({2, 2}, {"a", "b"}, [](const DeviceMesh& mesh) {
    const DistributedTensor whole =
        distribute_tensor(values({5, 4}), mesh, {Replicate{}, Replicate{}});
    EXPECT_ERROR(whole.full_tensor(Placements{Shard{0}, Replicate{}}), "full_tensor: ", "[5, 4]");
    EXPECT_ERROR(DistributedTensor::from_local(values({5, 4}), mesh, {Replicate{}, Replicate{}}, {},
                                               Placements{Replicate{}, Shard{1}}),
                 "from_local: gradients of a [5, 4] part cannot be [Replicate(), Shard(1)]");
    // Uneven: equal on some ranks alone.
    const DistributedTensor rows = distribute_tensor(values({5, 4}), mesh, {Shard{0}, Replicate{}});
    EXPECT_ERROR(rows.to_local(Placements{Replicate{}, Shard{0}}), "to_local: gradients of a ");
  });
}

TEST(GradientPlacements, MayBeOthersOfTheSameSize) {
  RunOnMesh({2, 2}, {"a", "b"}, [](const DeviceMesh& mesh) {
    const Placements whole{Replicate{}, Replicate{}};
    const DistributedTensor tensor = distribute_tensor(values({4, 4}), mesh, whole);
    for (const Placement& other : {Placement(Replicate{}), Placement(Partial{})}) {
      EXPECT_EQ(tensor.to_local(Placements{other, Replicate{}}).size(0), 4);
      EXPECT_EQ(
          tensor.redistribute({Partial{}, Shard{0}}).to_local(Placements{other, Shard{0}}).size(0),
          2);
    }
    const DistributedTensor rows = tensor.redistribute({Shard{0}, Replicate{}});
    EXPECT_EQ(rows.to_local(Placements{Replicate{}, Shard{0}}).size(0), 2);
    const DistributedTensor both = tensor.redistribute({Shard{0}, Shard{0}});
    EXPECT_EQ(both.to_local(Placements{StridedShard{0, 2}, Shard{0}}).size(0), 1);
  });
}

}  // namespace
}  // namespace tessera
