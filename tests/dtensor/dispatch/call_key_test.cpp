// What the outcome of a call depends on tells calls apart.

#include "tessera/dtensor/check_rule.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::values;

TEST(CallKey, TellsPlainTensorsOfOtherStridesApart) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const at::Tensor d = distribute_tensor(values({4, 1}), mesh, {Replicate{}});
    const ReplicationScope scope;
    const auto plain = values({8, 4}).t();
    at::add(d, plain.contiguous());
    const auto y = at::add(d, plain);
    EXPECT_EQ(y.strides(), local_tensor(y).strides());
    EXPECT_EQ(y.strides(), at::add(values({4, 1}), plain).strides());
    EXPECT_TRUE(at::equal(DistributedTensor(y).full_tensor(), values({4, 1}).add(plain)));
  });
}

// equal() compares the parts, which a strict scope allows, where there are any; those of meta
// tensors it cannot.
TEST(CallKey, TellsMetaTensorsApart) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const auto on = [&](c10::DeviceType device) {
      return distribute_tensor(values({4, 2}).to(device), mesh, {Shard{0}}).tensor();
    };
    const auto x = on(at::kCPU), meta = on(at::kMeta);
    EXPECT_THROWN(c10::Error, at::equal(meta, meta.clone()), "aten::equal", "Meta tensors");
    const StrictScope strict;
    EXPECT_TRUE(at::equal(x, x.clone()));
  });
}

// A plan that was made for a tensor which is its own must not serve a copy that may be out of date.
TEST(CallKey, TellsViewsThatHoldACopyApart) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(values({4, 2}), mesh, {Shard{0}});
    const auto view = x.slice(0, 1, 3);
    const at::Tensor own = distribute_tensor(values({2, 2}), mesh, {Replicate{}});
    ASSERT_EQ(DistributedTensor(view).placements(), DistributedTensor(own).placements());
    for (int i = 0; i < 2; ++i) {
      own.neg();
    }
    EXPECT_TRUE(at::equal(DistributedTensor(view.neg()).full_tensor(),
                          values({4, 2}).slice(0, 1, 3).neg()));
    x.zero_();
    EXPECT_ERROR(view.neg(), "aten::neg");
  });
}

TEST(CallKey, AComplexNumberThatARuleWouldReadLeavesTheCallWithoutOne) {
  RunOnMesh({4}, {"x"}, [](const DeviceMesh& mesh) {
    const auto plain = at::complex(values({5, 3}), values({5, 3}, 1));
    for (const Placement& placement : {Placement(Shard{0}), Placement(Partial{})}) {
      const at::Tensor x = distribute_tensor(plain, mesh, {placement});
      for (const c10::complex<double> value : {c10::complex<double>(0, 1), {2, 0}, {0, 0}}) {
        const auto found = at::constant_pad_nd(x, {1, 1}, value);
        EXPECT_TRUE(at::allclose(DistributedTensor(found).full_tensor(),
                                 at::constant_pad_nd(plain, {1, 1}, value)));
      }
    }
  });
}

TEST(CallKey, ClearingTheCacheReleasesTheMeshesOfRedistributions) {
  std::weak_ptr<comm::World> world;
  {
    const auto made = comm::fake_world(0, 2);
    world = made;
    const auto mesh = init_device_mesh(made, {2}, {"x"});
    distribute_tensor(values({4}), mesh, {Shard{0}}).redistribute({Partial{}});
  }
  EXPECT_FALSE(world.expired());
  clear_dispatch_cache();
  EXPECT_TRUE(world.expired());
}

}  // namespace
}  // namespace tessera
