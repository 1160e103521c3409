// Units that are called otherwise than once from the root's forward.

#include <tuple>

#include "fsdp/training/training.h"

namespace tessera::fsdp {
namespace {

using testing::kRows;

std::unique_ptr<SmallModel> model_over(const DeviceMesh& mesh) {
  auto model = std::make_unique<SmallModel>(kDim, kHidden, kClasses);
  testing::fill(*model);
  shard(*model, mesh);
  return model;
}

/// Gradients that are undefined on one side must be so on the other.
void expect_as_alone(const nn::ModuleBase& model, const nn::ModuleBase& alone) {
  const auto expected = alone.named_slots();
  std::size_t i = 0;
  for (const auto& [name, slot] : model.named_slots()) {
    const at::Tensor& other = expected[i++].second->get().grad();
    const at::Tensor& gradient = slot->persistent().grad();
    ASSERT_EQ(gradient.defined(), other.defined()) << name;
    if (other.defined()) {
      EXPECT_TRUE(full_tensor(gradient).allclose(other, 1e-4, 1e-6)) << name;
    }
  }
}

at::Tensor rows_of_rank(const Rank& rank, std::int64_t dim) {
  const std::int64_t rows = kRows / rank.size();
  return testing::batch(dim, 0).narrow(0, rank.rank() * rows, rows);
}

// PyTorch refuses both.
TEST(UnitCalls, MayBeginWithABlockBeforeTheRoot) {
  const std::vector<at::Tensor> expected = testing::gradients_alone();
  RunRanks(2, [&](Rank& rank) {
    const auto model = model_over(rank.mesh({2}, {"dp"}));
    {
      const c10::AutoGradMode no_grad(false);
      (*model->blocks[1])(testing::batch(kDim, 0));
    }
    local_loss(*model, rank).backward();
    testing::expect_gradients(*model, expected);
  });
}

TEST(UnitCalls, MayBeOfABlockAlone) {
  Filled<SmallModel> alone(kDim, kHidden, kClasses);
  (*alone.blocks[1])(testing::batch(kDim, 0)).square().mean().backward();
  RunRanks(3, [&](Rank& rank) {
    const auto model = model_over(rank.mesh({3}, {"dp"}));
    for (const bool root_ran : {false, true}) {
      (*model->blocks[1])(rows_of_rank(rank, kDim)).square().mean().backward();
      expect_as_alone(*model, alone);
      EXPECT_TRUE(tessera::is_distributed(model->blocks[1]->up->weight));
      if (!root_ran) {
        local_loss(*model, rank).backward();
      }
      for (const auto& [name, slot] : model->named_slots()) {
        slot->persistent().mutable_grad().reset();
      }
    }
  });
}

/// Blocks, and a head that the caller runs.
struct Headless : nn::Module<Headless> {
  at::Tensor forward(const at::Tensor& x) { return (*second)((*first)(x)); }

  nn::Child<testing::Block> first{*this, "first", kDim, kHidden};
  nn::Child<testing::Block> second{*this, "second", kDim, kHidden};
  nn::Child<nn::Linear> head{*this, "head", kDim, kClasses};
};

/// The loss of two chunks of the rows, one after the other, each with its own backward that
/// ends before the model's begins.
void chunked_backward(Headless& model, const at::Tensor& x) {
  const at::Tensor hidden = model(x);
  const at::Tensor leaf = hidden.detach().requires_grad_();
  for (const at::Tensor& chunk : leaf.chunk(2)) {
    ((*model.head)(chunk).square().sum() / x.size(0)).backward();
  }
  hidden.backward(leaf.grad());
}

TEST(UnitCalls, MayRunAHeadWithSeveralBackwards) {
  Filled<Headless> alone;
  chunked_backward(alone, testing::batch(kDim, 0));
  RunRanks(2, [&](Rank& rank) {
    for (const bool reshard : {true, false}) {
      Filled<Headless> model;
      const DeviceMesh mesh = rank.mesh({2}, {"dp"});
      for (nn::ModuleBase* unit : std::initializer_list<nn::ModuleBase*>{
               &*model.first, &*model.second, &*model.head, &model}) {
        fully_shard(*unit, mesh, {.reshard_after_forward = reshard});
      }
      chunked_backward(model, rows_of_rank(rank, kDim));
      expect_as_alone(model, alone);
    }
  });
}

/// One unit that runs three times, as the layers of a recurrent model.
struct Recurrent : nn::Module<Recurrent> {
  at::Tensor forward(const at::Tensor& x) { return (*cell)((*other)((*cell)((*cell)(x)))); }

  nn::Child<testing::Block> cell{*this, "cell", kDim, kHidden};
  nn::Child<testing::Block> other{*this, "other", kDim, kHidden};
};

TEST(UnitCalls, MayBeSeveralInOneForward) {
  Filled<Recurrent> alone;
  alone(testing::batch(kDim, 0)).square().mean().backward();
  RunRanks(2, [&](Rank& rank) {
    for (const bool reshard : {true, false}) {
      Filled<Recurrent> model;
      const DeviceMesh mesh = rank.mesh({2}, {"dp"});
      fully_shard(*model.cell, mesh, {.reshard_after_forward = reshard});
      fully_shard(*model.other, mesh, {.reshard_after_forward = reshard});
      fully_shard(model, mesh);
      model(rows_of_rank(rank, kDim)).square().mean().backward();
      expect_as_alone(model, alone);
    }
  });
}

/// Returns a result that a loss may leave out, one without a gradient, and a number.
struct Several : nn::Module<Several> {
  std::tuple<at::Tensor, at::Tensor, at::Tensor, int> forward(const at::Tensor& x) {
    const at::Tensor y = (*a)(x);
    return {y, (*b)(y), y.argmax(1), 3};
  }

  nn::Child<nn::Linear> a{*this, "a", kDim, kDim}, b{*this, "b", kDim, kDim};
};

/// `second`: which of the results the loss takes.
at::Tensor loss_of_several(Several& first, Several& last, const at::Tensor& x, bool second) {
  const auto [y, z, best, three] = first(x);
  const auto [u, v, ignored, three_again] = last(second ? z : y);
  return u.square().mean() * (three + three_again);
}

TEST(UnitCalls, MayHaveResultsThatAreNotUsed) {
  const at::Tensor x = testing::batch(kDim, 0);
  for (const bool second : {false, true}) {
    Several alone[2];
    for (Several& model : alone) {
      testing::fill(model);
    }
    loss_of_several(alone[0], alone[1], x, second).backward();
    RunRanks(3, [&](Rank& rank) {
      Several models[2];
      for (Several& model : models) {
        testing::fill(model);
        fully_shard(model, rank.mesh({3}, {"dp"}));
      }
      loss_of_several(models[0], models[1], rows_of_rank(rank, kDim), second).backward();
      for (int i = 0; i < 2; ++i) {
        const auto expected = alone[i].named_slots();
        std::size_t parameter = 0;
        for (const auto& [name, slot] : models[i].named_slots()) {
          const at::Tensor& other = expected[parameter++].second->get().grad();
          const at::Tensor& gradient = slot->persistent().grad();
          if (!gradient.defined()) {
            EXPECT_FALSE(other.defined()) << name;
          } else {  // zeros where a rank might have used it
            EXPECT_TRUE(full_tensor(gradient).allclose(
                other.defined() ? other : at::zeros_like(full_tensor(gradient)), 1e-4, 1e-6))
                << name;
          }
        }
      }
    });
  }
}

}  // namespace
}  // namespace tessera::fsdp
