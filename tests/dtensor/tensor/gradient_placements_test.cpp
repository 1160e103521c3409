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

}  // namespace
}  // namespace tessera
