// What clip_grad_norm_ does beside computing a norm, which grad_norm_test compares with libtorch.
#include "tessera/optim/clip_grad.h"

#include <algorithm>
#include <iterator>

#include "optim/parameters.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/linear.h"
#include "tessera/optim/optimizer.h"
#include "testing/module_values.h"

namespace tessera::optim {
namespace {

TEST(ClipGradNorm, RefusesPlainGradientsThatDifferBesideDistributedOnes) {
  RunRanks(3, [](Rank& rank) {
    nn::Linear body(4, 6), head(6, 2);
    testing::fill(body);
    testing::fill(head);
    nn::distribute_parameter(*body.slot("weight"), rank.mesh({3}, {"dp"}), {Shard{0}});
    std::vector<nn::SlotPtr> slots = slots_of(body);
    std::ranges::copy(slots_of(head), std::back_inserter(slots));
    for (const nn::SlotPtr& slot : slots) {
      slot->get().mutable_grad() = at::ones_like(slot->get());
    }
    EXPECT_NO_THROW(clip_grad_norm_(slots, 1));
    testing::Filled<nn::Linear> other(6, 2);
    other.weight->mutable_grad() = at::full({2, 6}, rank.rank() == 2 ? 2.0 : 1.0);
    std::ranges::copy(slots_of(other), std::back_inserter(slots));
    EXPECT_ERROR(clip_grad_norm_(slots, 1), "the gradient of parameter 'weight'", "ranks 0 and 2",
                 "fsdp::fully_shard");
    EXPECT_ERROR(clip_grad_norm_(slots, 1), "ranks 0 and 2");
  });
}

TEST(ClipGradNorm, ReducesPendingGradientsFirst) {
  RunOnMesh({2}, {"tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const nn::SlotPtr slot = slot_of(at::zeros({2}), mesh, {Replicate{}});
    const at::Tensor term = rank.rank() == 0 ? at::tensor({3.0F, 0.0F}) : at::tensor({0.0F, 4.0F});
    slot->get().mutable_grad() =
        DistributedTensor::from_local(term, mesh, {Partial{}}).tensor().detach();
    EXPECT_FLOAT_EQ(clip_grad_norm_({slot}, 1e9).item<float>(), 5.0F);
  });
}

TEST(ClipGradNorm, CommunicatesOneAllReduce) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    std::vector<nn::SlotPtr> slots{slot_of(at::zeros(kSizes[0]), mesh, {Shard{0}, Shard{0}}),
                                   slot_of(at::zeros(kSizes[1]), mesh["tp"], {Shard{0}})};
    set_grad(slots[0], normal_values(kSizes[0], 0));
    set_grad(slots[1], normal_values(kSizes[1], 1));
    const auto before = rank.world()->traffic().table();
    clip_grad_norm_(slots, 1.0);
    EXPECT_EQ(comm::total(rank.world()->traffic().since(before)).calls, 1);
  });
}

// A rank without any gradient still takes part: its peers must not hang.
TEST(ClipGradNorm, AgreesWhenARankHasNoGradient) {
  RunOnMesh({2}, {"dp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const nn::SlotPtr slot = slot_of(at::zeros({4}), mesh, {Shard{0}});
    if (rank.rank() == 0) {
      set_grad(slot, at::tensor({3.0F, 4.0F, 0.0F, 0.0F}));
    }
    EXPECT_FLOAT_EQ(clip_grad_norm_({slot}, 1e9).item<float>(), 5.0F);
  });
}

TEST(ClipGradNorm, IsZeroWithoutParameters) {
  EXPECT_EQ(clip_grad_norm_({}, 1.0).item<float>(), 0.0F);
  EXPECT_EQ(clip_grad_norm_({slot_of(at::ones({2}))}, 1.0).item<float>(), 0.0F);
}

TEST(ClipGradNorm, LeavesSmallGradientsAsTheyAre) {
  const nn::SlotPtr slot = slot_of(at::zeros({2}));
  set_grad(slot, at::tensor({0.3F, 0.4F}));
  clip_grad_norm_({slot}, 1.0);
  EXPECT_TRUE(slot->get().grad().equal(at::tensor({0.3F, 0.4F})));
}

}  // namespace
}  // namespace tessera::optim
