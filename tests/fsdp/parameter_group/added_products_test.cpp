// Micro-batches before the reduction: products of a later one are added to the gradients that FSDP
// keeps of the earlier ones.
#include <torch/csrc/autograd/autograd.h>

#include "fsdp/training/training.h"
#include "tessera/nn/activation_checkpointing.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/added_terms.h"

namespace tessera::fsdp {
namespace added_products {

using testing::AddedTerms;

constexpr int kWeights = 7;  // three blocks of two, and the head

/// Rows in three dimensions, so that every matrix is a weight or the gradient of one.
at::Tensor loss_of_rows(SmallModel& model, const Rank& rank, int step) {
  const std::int64_t rows = testing::kRows / rank.size();
  const at::Tensor x = testing::batch(kDim, step).narrow(0, rank.rank() * rows, rows);
  return model(x.unsqueeze(0)).square().mean();
}

/// Three micro-batches, of which the last reduces.
void accumulate(SmallModel& model, const Rank& rank) {
  for (int i = 0; i < 3; ++i) {
    set_requires_gradient_sync(model, i == 2);
    loss_of_rows(model, rank, i).backward();
  }
}

class AddedProducts : public ::testing::TestWithParam<Arrangement> {
 protected:
  int ranks() const { return testing::ranks_of(GetParam().sizes); }
  /// Runs three micro-batches on the ranks of the mesh, counted. `prepare`: before it is sharded.
  template <class Prepare, class Check>
  void run(Prepare prepare, Check check) const {
    AddedTerms::reset();
    RunRanks(ranks(), [&](Rank& rank) {
      Filled<SmallModel> model(kDim, kHidden, kClasses);
      prepare(model);
      shard(model, rank.mesh(GetParam().sizes, GetParam().names), GetParam().options);
      {
        const AddedTerms counted;
        accumulate(model, rank);
      }
      check(model);
    });
  }
};

TEST_P(AddedProducts, AreTheGradientsOfOneRank) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1, 2});
  run([](SmallModel&) {}, [&](SmallModel& model) { expect_gradients(model, expected); });
  EXPECT_EQ(AddedTerms::products(), 2 * kWeights * ranks());
  EXPECT_EQ(AddedTerms::additions(), 0);
}

TEST_P(AddedProducts, AreThoseOfACheckpointedModel) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1, 2});
  run(
      [](SmallModel& model) {
        nn::apply_activation_checkpointing(model, {.select = nn::of_class<testing::Block>()});
      },
      [&](SmallModel& model) { expect_gradients(model, expected); });
  EXPECT_EQ(AddedTerms::products(), 2 * kWeights * ranks());
  EXPECT_EQ(AddedTerms::additions(), 0);
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, AddedProducts,
    ::testing::Values(Arrangement{"OneRank", {1}, {"dp"}}, Arrangement{"Uneven", {3}, {"dp"}},
                      Arrangement{"Whole", {2}, {"dp"}, {.reshard_after_forward = false}},
                      Arrangement{"Replicas", {2, 2}, {"replicate", "shard"}},
                      Arrangement{"OnTheHost", {2}, {"dp"}, {.offload_policy = OffloadPolicy{}}},
                      Arrangement{"Unused", {2}, {"dp"}, {.may_be_unused = true}}),
    [](const auto& info) { return info.param.name; });

/// The counts of products and additions, and whether the gradients are close to those of one rank.
void expect_of_types(const MixedPrecisionPolicy& policy, int products, int additions) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1, 2});
  AddedTerms::reset();
  RunRanks(2, [&](Rank& rank) {
    ShardedModel model(rank.mesh({2}, {"dp"}), {.mp_policy = policy});
    {
      const AddedTerms counted;
      accumulate(model, rank);
    }
    const std::vector<at::Tensor> gradients = take_gradients(model);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(gradients[i].allclose(expected[i], 0.1, 0.02)) << i;
    }
  });
  EXPECT_EQ(AddedTerms::products(), products);
  EXPECT_EQ(AddedTerms::additions(), additions);
}

TEST(AddedProductsOfTypes, AreAddedWhereTheReductionHasThatOfTheProduct) {
  expect_of_types({.param_dtype = at::kBFloat16}, 2 * 2 * kWeights, 0);
}

TEST(AddedProductsOfTypes, AreAddedByThemselvesInAWiderOne) {
  expect_of_types({.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}, 0, 2 * 2 * kWeights);
}

TEST(AddedProductsOfTensorParallelWeights, AreAddedToLocalParts) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1, 2});
  AddedTerms::reset();
  RunOnMesh({2, 2}, {"dp", "tp"}, [&](Rank&, const DeviceMesh& mesh) {
    using namespace tensor_parallel;
    Filled<SmallModel> model(kDim, kHidden, kClasses);
    parallelize_module(model, mesh["tp"],
                       {{"block*.up", colwise_parallel()}, {"block*.down", rowwise_parallel()}});
    shard(model, mesh["dp"]);
    const std::int64_t rows = testing::kRows / 2;
    const std::int64_t first = mesh.local_rank("dp") * rows;
    {
      const AddedTerms counted;
      for (int i = 0; i < 3; ++i) {
        set_requires_gradient_sync(model, i == 2);
        testing::loss_of(model, testing::batch(kDim, i), first, rows).backward();
      }
    }
    expect_gradients(model, expected);
  });
  // Not to the head's, which both ranks of tp hold: it could come as a pending sum.
  EXPECT_EQ(AddedTerms::products(), 2 * (kWeights - 1) * 4);
}

/// One unit; a call uses `b` once or twice, and `a` or not.
struct Shared : nn::Module<Shared> {
  at::Tensor forward(const at::Tensor& x, bool twice) {
    const at::Tensor y = (*b)(x).square().sum();
    return twice ? y + (*b)(x.mul(2)).square().sum() : y + (*a)(x).square().sum();
  }
  nn::Child<nn::Linear> a{*this, "a", 3, 5}, b{*this, "b", 3, 5};
};

at::Tensor shared_rows(int rank, int step) {
  return testing::uniform_values({1, 2, 3}, rank + 10 * step);
}

/// The mean over two ranks of the sum of these losses' gradients.
std::vector<at::Tensor> shared_alone(const std::vector<int>& steps) {
  Filled<Shared> alone;
  for (const int rank : {0, 1}) {
    for (const int step : steps) {
      alone(shared_rows(rank, step), step > 0).div(2).backward();
    }
  }
  return testing::gradients_of(alone);
}

/// Runs `body` on two ranks with the model and the loss of a step on that rank's rows.
void run_shared(
    const std::function<void(Shared&, const std::function<at::Tensor(int)>& loss)>& body) {
  RunRanks(2, [&](Rank& rank) {
    Filled<Shared> model;
    fully_shard(model, rank.mesh({2}, {"dp"}));
    set_requires_gradient_sync(model, false);
    body(model, [&](int step) { return model(shared_rows(rank.rank(), step), step > 0); });
  });
}

/// As an optimizer does: a backward under way has other tensors in the slots.
void drop_gradients(const Shared& model) {
  for (const auto& [name, slot] : model.named_slots()) {
    slot->persistent().mutable_grad().reset();
  }
}

TEST(AddedProductsOfAUnit, AreThoseOfEachUseAndOfNone) {
  const std::vector<at::Tensor> expected = shared_alone({0, 1, 2});
  AddedTerms::reset();
  run_shared([&](Shared& model, const auto& loss) {
    const AddedTerms counted;
    loss(0).backward();
    loss(1).backward();
    set_requires_gradient_sync(model, true);
    loss(2).backward();
    expect_gradients(model, expected);
  });
  EXPECT_EQ(AddedTerms::products(), 2 * 2 * 2);
  EXPECT_EQ(AddedTerms::additions(), 0);
}

TEST(AddedProductsOfAUnit, MayBeRecorded) {
  const std::vector<at::Tensor> expected = shared_alone({0, 1, 2});
  run_shared([&](Shared& model, const auto& loss) {
    loss(0).backward();
    loss(1).backward({}, /*keep_graph=*/true, /*create_graph=*/true);
    set_requires_gradient_sync(model, true);
    loss(2).backward();
    expect_gradients(model, expected);
  });
}

TEST(AddedProductsOfAUnit, AreNotInWhatIsAskedForAlone) {
  const std::vector<at::Tensor> expected = shared_alone({0, 2});
  const std::vector<at::Tensor> asked = shared_alone({1});
  run_shared([&](Shared& model, const auto& loss) {
    loss(0).backward();
    const at::Tensor weight = model.b->slot("weight")->persistent();
    set_requires_gradient_sync(model, true);
    const std::vector<at::Tensor> given = torch::autograd::grad({loss(1)}, {weight});
    EXPECT_TRUE(full_tensor(given[0]).allclose(asked[2], 1e-4, 1e-6));
    loss(2).backward();
    expect_gradients(model, expected);
  });
}

TEST(AddedProductsOfAUnit, AreNotLostInABackwardThatFails) {
  const std::vector<at::Tensor> expected = shared_alone({0, 1});
  run_shared([&](Shared& model, const auto& loss) {
    loss(0).backward();
    const at::Tensor failing = loss(1);
    failing.register_hook([](const at::Tensor& gradient) -> at::Tensor {
      fail("no gradient of sizes ", gradient.sizes());
    });
    EXPECT_ERROR(failing.mul(2).backward(), "no gradient");
    set_requires_gradient_sync(model, true);
    loss(1).backward();
    expect_gradients(model, expected);
  });
}

TEST(AddedProductsOfAUnit, AreDroppedAfterABackwardThatFails) {
  const std::vector<at::Tensor> expected = shared_alone({0});
  run_shared([&](Shared& model, const auto& loss) {
    loss(0).mul(std::nan("")).backward();
    const at::Tensor failing = loss(1);
    failing.register_hook([](const at::Tensor& gradient) -> at::Tensor {
      fail("no gradient of sizes ", gradient.sizes());
    });
    EXPECT_ERROR(failing.mul(2).backward(), "no gradient");
    drop_gradients(model);
    set_requires_gradient_sync(model, true);
    loss(0).backward();
    expect_gradients(model, expected);
  });
}

TEST(AddedProductsOfAUnit, AreNotDroppedWhileTheyAreAdded) {
  run_shared([](Shared& model, const auto& loss) {
    loss(0).backward();
    const at::Tensor dropping = loss(1);
    dropping.register_hook([&](const at::Tensor& gradient) {
      drop_gradients(model);
      return gradient;
    });
    EXPECT_ERROR(dropping.backward(), "'a.weight'", "was dropped", "before or after");
  });
}

}  // namespace added_products
}  // namespace tessera::fsdp
