// Complex parameters: an optimizer updates them as the pairs of real numbers that they are, and a
// norm is of their moduli.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "parameters.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/sgd.h"
#include "testing/ranks.h"

namespace tessera::optim {
namespace {
namespace complex_parameters {

using Make = std::function<std::shared_ptr<Optimizer>(std::vector<nn::SlotPtr>)>;

const std::vector<Make> kOptimizers{
    [](std::vector<nn::SlotPtr> slots) {
      return std::make_shared<AdamW>(std::move(slots), AdamWOptions{.lr = 0.1});
    },
    [](std::vector<nn::SlotPtr> slots) {
      return std::make_shared<Sgd>(std::move(slots), SgdOptions{.lr = 0.1, .momentum = 0.9});
    }};

at::Tensor pairs(std::int64_t seed) {
  return testing::uniform_values({7, 3, 2}, static_cast<double>(seed), 1.0).contiguous();
}

at::Tensor numbers(std::int64_t seed) {
  return at::view_as_complex(pairs(seed));
}

TEST(ComplexParameters, AreUpdatedAsPairsOfRealNumbers) {
  for (const Make& make : kOptimizers) {
    for (const int ranks : {1, 2, 4}) {
      const at::Tensor values = [&] {
        const nn::SlotPtr fresh = testing::slot_of(pairs(1));
        const auto optimizer = make({fresh});
        for (int step = 2; step < 5; ++step) {
          testing::set_grad(fresh, pairs(step));
          optimizer->step(0.5);
        }
        return fresh->get().detach();
      }();
      RunRanks(ranks, [&](Rank& rank) {
        // Beside a real one, which adjoins nothing.
        const nn::SlotPtr slot =
            testing::slot_of(numbers(1), rank.mesh({rank.size()}, {"dp"}), {Shard{0}});
        const nn::SlotPtr other = testing::slot_of(pairs(1));
        const auto optimizer = make({slot, other});
        for (int step = 2; step < 5; ++step) {
          // A conjugate is a view with a flag, as gradients may be.
          testing::set_grad(slot,
                            step == 3 ? numbers(step).conj().resolve_conj().conj() : numbers(step));
          testing::set_grad(other, pairs(step));
          optimizer->step(0.5);
        }
        EXPECT_TRUE(at::view_as_real(testing::full_tensor(slot->get())).allclose(values));
        EXPECT_TRUE(other->get().allclose(values));
      });
    }
  }
}

TEST(ComplexParameters, HaveTheNormOfTheirModuli) {
  for (const int ranks : {1, 2, 3}) {
    RunRanks(ranks, [](Rank& rank) {
      const DeviceMesh mesh = rank.mesh({rank.size()}, {"dp"});
      const nn::SlotPtr slot = testing::slot_of(numbers(1), mesh, {Shard{0}});
      const nn::SlotPtr real = testing::slot_of(pairs(1), mesh, {Shard{0}});
      testing::set_grad(slot, numbers(2));
      testing::set_grad(real, pairs(3));
      const at::Tensor moduli = numbers(2).abs();
      const double infinity = std::numeric_limits<double>::infinity();
      EXPECT_NEAR(grad_norm({slot}, {.norm_type = 1}).item<double>(), moduli.sum().item<double>(),
                  1e-4);
      EXPECT_NEAR(grad_norm({slot}, {.norm_type = infinity}).item<double>(),
                  moduli.max().item<double>(), 1e-6);
      const double expected =
          std::sqrt((moduli.square().sum() + pairs(3).square().sum()).item<double>());
      EXPECT_NEAR(clip_grad_norm_({slot, real}, 0.5).item<double>(), expected, 1e-5);
      EXPECT_TRUE(testing::full_tensor(slot->get().grad())
                      .allclose(numbers(2).mul(0.5 / (expected + 1e-6))));
      EXPECT_NEAR(grad_norm({slot, real}).item<double>(), 0.5, 1e-5);
    });
  }
}

}  // namespace complex_parameters
}  // namespace
}  // namespace tessera::optim
