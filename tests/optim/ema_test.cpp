#include "tessera/optim/optimizer.h"

#include "parameters.h"
#include "tessera/optim/adamw.h"

namespace tessera::optim {
namespace {

TEST(Ema, IsTheAverageOnUnevenShards) {
  constexpr double kDecay = 0.8;
  RunOnMesh({3}, {"dp"}, [](const DeviceMesh& mesh) {
    for (const std::vector<std::int64_t>& sizes : kSizes) {
      const nn::SlotPtr slot = slot_of(normal_values(sizes, 1), mesh, {Shard{0}});
      const nn::SlotPtr frozen = slot_of(normal_values(sizes, 2), mesh, {Shard{0}});
      frozen->persistent().set_requires_grad(false);
      Ema ema(std::make_shared<Sgd>(std::vector<nn::SlotPtr>{slot, frozen}, SgdOptions{.lr = 0.5}),
              kDecay);
      at::Tensor expected = normal_values(sizes, 1);
      for (int step = 0; step < 3; ++step) {
        set_grad(slot, normal_values(sizes, 10 + static_cast<std::uint64_t>(step)));
        ema.step();
        ema.zero_grad();
        expected = kDecay * expected + (1 - kDecay) * full_tensor(slot->persistent());
      }
      const at::Tensor last = full_tensor(slot->persistent()).clone();
      // Only of what is trained, and in the parameter's layout.
      const std::vector<StateTensor> state = ema.state();
      ASSERT_EQ(state.size(), 1u);
      EXPECT_EQ(state[0].name, "ema");
      EXPECT_EQ(sharding_spec(state[0].tensor), sharding_spec(slot->persistent()));
      EXPECT_CLOSE(state[0].tensor, expected, 1e-5, 1e-6);
      ema.swap();
      EXPECT_CLOSE(slot->persistent(), expected, 1e-5, 1e-6);
      ema.swap();
      EXPECT_EQUAL(slot->persistent(), last);
    }
  });
}

TEST(Ema, ContinuesFromALoadedState) {
  const nn::SlotPtr slot = slot_of(at::ones({3}));
  Ema ema(std::make_shared<Sgd>(std::vector<nn::SlotPtr>{slot}, SgdOptions{.lr = 1}), 0.5);
  {
    const c10::NoGradGuard no_grad;
    ema.state()[0].tensor.fill_(5);
  }
  set_grad(slot, at::ones({3}));
  ema.step();
  EXPECT_EQUAL(ema.state()[0].tensor, at::full({3}, 2.5));
}

/// A checkpoint without averages fills the parameters after state() was asked for.
TEST(Ema, BeginsWithTheParametersOfTheFirstStep) {
  const nn::SlotPtr slot = slot_of(at::ones({3}));
  Ema ema(std::make_shared<Sgd>(std::vector<nn::SlotPtr>{slot}, SgdOptions{.lr = 1}), 0.5);
  EXPECT_EQUAL(ema.state()[0].tensor, at::ones({3}));
  slot->persistent().detach().fill_(5);
  set_grad(slot, at::ones({3}));
  ema.step();
  EXPECT_EQUAL(ema.state()[0].tensor, at::full({3}, 4.5));
}

TEST(Ema, RefusesStepsAndItsStateWhileSwapped) {
  const nn::SlotPtr slot = slot_of(at::ones({3}));
  Ema ema(std::make_shared<Sgd>(std::vector<nn::SlotPtr>{slot}, SgdOptions{}), 0.5);
  ema.swap();
  for (const char* part : {"while the parameters are the averages", "call swap() again first"}) {
    EXPECT_ERROR(ema.step(), part);
    EXPECT_ERROR(ema.step(at::ones({}, at::kDouble)), part);
    EXPECT_ERROR(ema.state(), part);
  }
  ema.swap();
  EXPECT_EQ(ema.state().size(), 1U);
}

TEST(Ema, ChecksAllParametersBeforeItSwapsTheFirst) {
  const nn::SlotPtr slot = slot_of(at::ones({3}));
  const nn::SlotPtr narrow = slot_of(at::ones({3}, at::kBFloat16));
  Ema ema(std::make_shared<Sgd>(std::vector<nn::SlotPtr>{slot, narrow}, SgdOptions{.lr = 1}), 0.5);
  set_grad(slot, at::ones({3}));
  ema.step();
  EXPECT_ERROR(ema.swap(), "narrower than its average");
  EXPECT_EQUAL(slot->persistent(), at::zeros({3}));
  EXPECT_EQ(ema.state().size(), 2U);
}

TEST(Ema, Refusals) {
  const nn::SlotPtr slot = slot_of(at::ones({3}, at::kBFloat16));
  const auto sgd = std::make_shared<Sgd>(std::vector<nn::SlotPtr>{slot}, SgdOptions{});
  EXPECT_ERROR(Ema(sgd, 1.0), "decay 1", "[0, 1)");
  EXPECT_ERROR(Ema(nullptr, 0.5), "null optimizer");
  Ema ema(sgd, 0.5);
  EXPECT_ERROR(ema.swap(), "narrower than its average");
  {
    const nn::SlotPtr slot = slot_of(at::ones({3}));
    Ema ema(std::make_shared<Sgd>(std::vector<nn::SlotPtr>{slot}, SgdOptions{.lr = 1}), 0.5);
    EXPECT_EQ(ema.state().size(), 1U);
    slot->set(at::ones({2}).requires_grad_());  // as fully_shard does
    set_grad(slot, at::ones({2}));
    EXPECT_ERROR(ema.step(), "has sizes [2] on cpu but had [3] on cpu when its average began");
    EXPECT_EQUAL(slot->persistent(), at::ones({2}));
  }
}

}  // namespace
}  // namespace tessera::optim
