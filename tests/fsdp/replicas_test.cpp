// Tests HSDP (replicas of shards), replicate() (unsharded parameters, reduced in buckets), and
// world_mesh().

#include "fsdp/training/training.h"

namespace tessera::fsdp::replicas {

struct Either : nn::Module<Either> {
  at::Tensor forward(const at::Tensor& x, bool first) { return (first ? *a : *b)(x); }
  nn::Child<nn::Linear> a{*this, "a", 3, 3}, b{*this, "b", 3, 3};
};

// In this case FSDP2 of PyTorch adds gradients of different parameters, which is wrong.
TEST(Replicas, ReduceMicroBatchesThatUseDifferentParameters) {
  const at::Tensor x = uniform_values({8, 3}, 3);
  Filled<Either> alone;
  alone(x, true).sum().add(alone(x, false).square().sum()).div(4).backward();
  RunRanks(4, [&](Rank& rank) {
    Filled<Either> model;
    fully_shard(model, rank.mesh({2, 2}, {"replicate", "shard"}));
    const at::Tensor rows = x.narrow(0, 2 * rank.rank(), 2);
    const Sent sent(rank);
    set_requires_all_reduce(model, false);
    model(rows, true).sum().backward();
    EXPECT_ERROR(model.a->slot("weight")->persistent().grad().sum(), "is not reduced");
    set_requires_all_reduce(model, true);
    model(rows, false).square().sum().backward();
    EXPECT_EQ(sent.calls("replicate", "all_reduce"), 1);
    EXPECT_EQ(sent.calls("shard", "reduce_scatter"), 2);
    expect_gradients(model, gradients_of(alone));
  });
}

// In fp16, FSDP divides gradients twice: before the sum over ranks and after the sum.
TEST(Replicas, AddMicroBatchesOfDifferentDivideFactors) {
  const auto gradient_after = [](Rank& rank, const std::function<void(nn::Linear&)>& change) {
    nn::Linear linear(4, 4, {.bias = false});
    testing::fill(linear);
    linear.to(at::kHalf);
    fully_shard(linear, rank.mesh({2, 2}, {"replicate", "shard"}));
    const auto backward = [&] {
      linear(at::ones({1, 4}, linear.slot("weight")->persistent().scalar_type())).sum().backward();
    };
    set_requires_all_reduce(linear, false);
    backward();
    set_requires_all_reduce(linear, true);
    change(linear);
    backward();
    return full_grad(linear).to(at::kFloat);
  };
  RunRanks(4, [&](Rank& rank) {
    const auto expect = [&](double value, const std::function<void(nn::Linear&)>& change) {
      EXPECT_TRUE(gradient_after(rank, change).equal(at::full({4, 4}, value)));
    };
    expect(2, [](nn::Linear&) {});
    expect(2, [](nn::Linear& linear) { set_force_sum_reduction(linear, true); });
    expect(8, [](nn::Linear& linear) { set_gradient_divide_factor(linear, 1); });
    expect(2, [](nn::Linear& linear) { linear.to(at::kFloat); });
  });
}

constexpr std::int64_t kBlock = packed_numel({kHidden * kDim, kHidden, kDim* kHidden, kDim});

TEST_ON_RANKS(Replicate, DoesNotCopyParameters, 2) {
  Filled<nn::Linear> linear(3, 4);
  replicate(linear, rank.mesh({2}, {"dp"}));
  const nn::SlotPtr slot = linear.slot("weight");
  const UnshardScope scope(linear);
  EXPECT_FALSE(tessera::is_distributed(slot->get()));
  EXPECT_EQ(DistributedTensor(slot->persistent()).placements(), Placements{Replicate{}});
  EXPECT_EQ(slot->get().const_data_ptr(), local_tensor(slot->persistent()).const_data_ptr());
}

TEST_ON_MESH(Replicate, CombinesWithShardedUnits, {4}, {"dp"}) {
  const std::vector<at::Tensor> expected = gradients_alone();
  Filled<SmallModel> model(kDim, kHidden, kClasses);
  replicate(*model.blocks[1], mesh);
  fully_shard(model, mesh);
  const Sent sent(rank);
  local_loss(model, rank).backward();
  EXPECT_EQ(sent.of("dp", "all_reduce").bytes, 4 * kBlock);
  EXPECT_EQ(sent.calls("dp", "all_gather"), 1);
  EXPECT_EQ(sent.calls("dp", "reduce_scatter"), 1);
  expect_gradients(model, expected);
}

constexpr std::int64_t kWide = 600;
/// A full bucket has 1 MiB of parameters, so each weight (1.4 MiB) has its own bucket.
const Options kBuckets{.bucket_cap_mb = 1};
constexpr std::int64_t kLayers = 4;

struct Chain : nn::Module<Chain> {
  Chain() {
    for (std::int64_t i = 0; i < kLayers; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i),
                                       std::make_shared<nn::Linear>(kWide, kWide, kNoBias)));
    }
  }
  /// Calls the layers in order, without the layer with the index `skipped` (-1: none).
  at::Tensor forward(const at::Tensor& x, std::int64_t skipped) {
    at::Tensor y = x;
    for (std::int64_t i = 0; i < kLayers; ++i) {
      y = i == skipped ? y : at::tanh((*layers[static_cast<std::size_t>(i)])(y) * 0.1);
      if (i == 0 && y.requires_grad()) {
        y.register_hook([this](const at::Tensor&) { at_first_layer(); });
      }
    }
    return y;
  }
  static constexpr nn::LinearOptions kNoBias{.bias = false};
  std::vector<std::shared_ptr<nn::Linear>> layers;
  /// Called when backward has finished all layers except the first.
  std::function<void()> at_first_layer = [] {};
};

struct ReplicatedChain : Filled<Chain> {
  explicit ReplicatedChain(const Rank& rank) {
    replicate(*this, world_mesh(rank.world()), kBuckets);
  }
};

at::Tensor rows_from(std::int64_t first, std::int64_t count) {
  return uniform_values({4, kWide}, 3).narrow(0, first, count);
}

/// Compares the gradients of two ranks with those of one rank, after `prepare` has changed the
/// models. `early`: how many buckets are reduced before the first layer's backward.
void expect_early_buckets(std::int64_t early, const std::function<void(Chain&)>& prepare) {
  Filled<Chain> alone;
  alone(rows_from(0, 4), -1).square().mean().backward();
  RunRanks(2, [&](Rank& rank) {
    ReplicatedChain model(rank);
    prepare(model);
    const Sent sent(rank);
    std::int64_t found = -1;
    model.at_first_layer = [&] { found = sent.calls("dp", "all_reduce"); };
    model(rows_from(2 * rank.rank(), 2), -1).square().mean().backward();
    EXPECT_EQ(found, early);
    EXPECT_EQ(sent.calls("dp", "all_reduce"), kLayers);
    expect_gradients(model, gradients_of(alone));
  });
}

TEST(Buckets, AreReducedWhileBackwardComputes) {
  expect_early_buckets(kLayers - 2, [](Chain&) {});
}

// A parameter hook could write the parameter that backward still reads, so no bucket is reduced
// early.
TEST(Buckets, AreReducedAtTheEndIfAParameterHasAHook) {
  expect_early_buckets(0, [](Chain& model) {
    model.layers[3]->slot("weight")->persistent().register_hook(
        [](const at::Tensor& gradient) { return gradient; });
  });
}

struct Halves : nn::Module<Halves> {
  at::Tensor forward(const at::Tensor& x, bool second) {
    at::Tensor y = x;
    for (const std::size_t i :
         second ? std::vector<std::size_t>{2, 3} : std::vector<std::size_t>{0, 1}) {
      y = at::tanh((*chain->layers[i])(y) * 0.1);
    }
    return y;
  }
  nn::Child<Chain> chain{*this, "chain"};
};

// The second call's backward completes two buckets before the first call's backward begins.
TEST(Buckets, AreReducedOnceIfTheUnitIsCalledTwice) {
  Filled<Halves> alone;
  alone(alone(rows_from(0, 4), false), true).square().mean().backward();
  RunRanks(2, [&](Rank& rank) {
    Filled<Halves> model;
    replicate(model, world_mesh(rank.world()), kBuckets);
    const Sent sent(rank);
    model(model(rows_from(2 * rank.rank(), 2), false), true).square().mean().backward();
    EXPECT_EQ(sent.calls("dp", "all_reduce"), kLayers);
    expect_gradients(model, gradients_of(alone));
  });
}

std::vector<at::Tensor> gradients_of_skipping() {
  std::vector<at::Tensor> sums(kLayers);
  for (const std::int64_t skipped : {0, 2}) {
    Filled<Chain> alone;
    alone(rows_from(skipped, 2), skipped).square().mean().div(2).backward();
    std::size_t i = 0;
    for (const at::Tensor& gradient : gradients_of(alone)) {
      at::Tensor& sum = sums[i++];
      if (gradient.defined()) {
        sum = sum.defined() ? sum + gradient : gradient;
      }
    }
  }
  return sums;
}

TEST(Buckets, HaveTheSameOrderOnAllRanks) {
  const std::vector<at::Tensor> expected = gradients_of_skipping();
  RunRanks(2, [&](Rank& rank) {
    ReplicatedChain model(rank);
    const std::int64_t skipped = 2 * rank.rank();
    model(rows_from(skipped, 2), skipped).square().mean().backward();
    expect_gradients(model, expected);
  });
}

// Both models' buckets have equal sizes and use one process group.
TEST(Buckets, HaveTheSameOrderForTwoModels) {
  const std::vector<at::Tensor> expected = gradients_of_skipping();
  RunRanks(2, [&](Rank& rank) {
    ReplicatedChain whole(rank), skipping(rank);
    for (int step = 0; step < 2; ++step) {
      drop_gradients(whole);
      drop_gradients(skipping);
      const std::int64_t skipped = 2 * rank.rank();
      const at::Tensor x = rows_from(skipped, 2);
      (whole(x, -1).square().mean() + skipping(x, skipped).square().mean()).backward();
      expect_gradients(skipping, expected);
    }
  });
}

TEST(Buckets, ReduceTheSumOfMicroBatchesOnce) {
  Filled<Chain> alone;
  alone(rows_from(0, 4), -1).square().mean().backward();
  RunRanks(2, [&](Rank& rank) {
    ReplicatedChain model(rank);
    const Sent sent(rank);
    for (const std::int64_t i : {0, 1}) {
      set_requires_gradient_sync(model, i == 1);
      model(rows_from(2 * rank.rank() + i, 1), -1).square().mean().div(2).backward();
      EXPECT_EQ(sent.calls("dp", "all_reduce"), i * kLayers);
    }
    expect_gradients(model, gradients_of(alone));
    // A second backward through the same graph adds to the gradients.
    drop_gradients(model);
    const at::Tensor loss = model(rows_from(2 * rank.rank(), 2), -1).square().mean() / 2;
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    expect_gradients(model, gradients_of(alone));
  });
}

TEST(Buckets, SupportAutogradGrad) {
  Filled<Chain> alone;
  alone(rows_from(0, 4), -1).square().mean().backward();
  RunRanks(2, [&](Rank& rank) {
    ReplicatedChain model(rank);
    const at::Tensor loss = model(rows_from(2 * rank.rank(), 2), -1).square().mean();
    const auto gradients =
        torch::autograd::grad({loss}, {model.layers[3]->slot("weight")->persistent(),
                                       model.layers[1]->slot("weight")->persistent()});
    EXPECT_EACH(gradients, {gradients_of(alone)[3], gradients_of(alone)[1]}, 1e-4, 1e-6);
    EXPECT_FALSE(model.layers[0]->slot("weight")->persistent().grad().defined());
  });
}

}  // namespace tessera::fsdp::replicas
