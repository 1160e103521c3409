#include "tessera/optim/clip_grad.h"

#include <torch/nn/utils/clip_grad.h>

#include <algorithm>
#include <iterator>

#include "optim/parameters.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/linear.h"
#include "tessera/optim/optimizer.h"
#include "testing/module_values.h"

namespace tessera::optim {
namespace {

at::Tensor gradient(std::size_t i) {
  return normal_values(kSizes[i], static_cast<std::int64_t>(i));
}

struct Reference {
  std::vector<at::Tensor> grads;
  double norm;
};

Reference reference(double max_norm, std::size_t count = kSizes.size()) {
  std::vector<at::Tensor> parameters;
  for (std::size_t i = 0; i < count; ++i) {
    parameters.push_back(at::zeros(kSizes[i]).requires_grad_());
    parameters.back().mutable_grad() = gradient(i);
  }
  const double norm = torch::nn::utils::clip_grad_norm_(parameters, max_norm);
  Reference result{{}, norm};
  for (const at::Tensor& parameter : parameters) {
    result.grads.push_back(parameter.grad());
  }
  return result;
}

void expect_as_reference(const std::vector<nn::SlotPtr>& slots, double max_norm) {
  for (std::size_t i = 0; i < slots.size(); ++i) {
    set_grad(slots[i], gradient(i));
  }
  const at::Tensor norm = clip_grad_norm_(slots, max_norm);
  const Reference expected = reference(max_norm, slots.size());
  EXPECT_FALSE(tessera::is_distributed(norm));
  EXPECT_EQ(norm.dim(), 0);
  EXPECT_EQ(norm.scalar_type(), at::kFloat);
  EXPECT_NEAR(norm.item<double>(), expected.norm, 1e-6 * expected.norm);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    EXPECT_TRUE(full_tensor(slots[i]->get().grad()).allclose(expected.grads[i], 1e-5, 1e-7)) << i;
  }
}

TEST(ClipGradNorm, AgreesWithLibtorch) {
  for (const double max_norm : {0.5, 1e6}) {
    std::vector<nn::SlotPtr> slots;
    for (const auto& sizes : kSizes) {
      slots.push_back(slot_of(at::zeros(sizes)));
    }
    expect_as_reference(slots, max_norm);
  }
}

TEST(ClipGradNorm, AgreesOnOneMeshDimension) {
  RunOnMesh({4}, {"dp"}, [](const DeviceMesh& mesh) {
    std::vector<nn::SlotPtr> slots{slot_of(at::zeros(kSizes[0]), mesh, {Shard{0}}),
                                   slot_of(at::zeros(kSizes[1]), mesh, {Shard{0}}),
                                   slot_of(at::zeros(kSizes[2]), mesh, {Shard{0}}),
                                   slot_of(at::zeros(kSizes[3]), mesh, {Replicate{}})};
    expect_as_reference(slots, 0.5);
  });
}

// Every way a 2-D mesh may hold a parameter: both dimensions, one, none, a submesh of it.
TEST(ClipGradNorm, CountsEachElementOnceOnTwoMeshDimensions) {
  RunOnMesh({3, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    std::vector<nn::SlotPtr> slots{slot_of(at::zeros(kSizes[0]), mesh, {Shard{0}, Shard{0}}),
                                   slot_of(at::zeros(kSizes[1]), mesh, {Shard{0}, Replicate{}}),
                                   slot_of(at::zeros(kSizes[2]), mesh["tp"], {Shard{1}}),
                                   slot_of(at::zeros(kSizes[3]), mesh, {Replicate{}, Replicate{}})};
    expect_as_reference(slots, 0.5);
  });
}

TEST(ClipGradNorm, CountsPlainGradientsOnceBesideDistributedOnes) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    std::vector<nn::SlotPtr> slots{slot_of(at::zeros(kSizes[0]), mesh, {Shard{0}}),
                                   slot_of(at::zeros(kSizes[1]))};
    expect_as_reference(slots, 0.5);
  });
}

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
    EXPECT_ERROR(clip_grad_norm_(slots, 1),
                 "the gradient of parameter 'weight' differs from rank 0 on ranks 2",
                 "nobody sums it over the ranks", "fsdp::fully_shard");
    EXPECT_ERROR(grad_norm(slots, {}), "differs from rank 0 on ranks 2");
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
    for (std::size_t i = 0; i < slots.size(); ++i) {
      set_grad(slots[i], gradient(i));
    }
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
