// Complex parameters are updated and clipped as PyTorch does: by their real and imaginary parts,
// and by their absolute values.
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <limits>

#include "optim/parameters.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/muon.h"

namespace tessera::optim {
namespace complex_test {

/// As pairs of real numbers.
at::Tensor pairs(const std::vector<std::int64_t>& sizes, int seed) {
  std::vector<std::int64_t> all = sizes;
  all.push_back(2);
  return normal_values(all, seed);
}

at::Tensor value(std::size_t i) {
  return pairs(kSizes[i], static_cast<int>(i));
}

at::Tensor gradient(std::size_t i, int step) {
  return pairs(kSizes[i], 100 * (step + 1) + static_cast<int>(i));
}

/// Three steps of libtorch's optimizer on the pairs.
template <class Reference, class Options>
std::vector<at::Tensor> trained_pairs(const Options& options) {
  std::vector<at::Tensor> parameters;
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    parameters.push_back(value(i).clone().requires_grad_());
  }
  Reference reference(parameters, options);
  for (int step = 0; step < 3; ++step) {
    for (std::size_t i = 0; i < kSizes.size(); ++i) {
      parameters[i].mutable_grad() = gradient(i, step);
    }
    reference.step();
  }
  return parameters;
}

using MakeSlot = std::function<nn::SlotPtr(const at::Tensor&)>;

template <class Ours, class Options>
void expect_trained(const MakeSlot& make, const Options& options,
                    const std::vector<at::Tensor>& expected) {
  std::vector<nn::SlotPtr> slots;
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    slots.push_back(make(at::view_as_complex(value(i))));
  }
  Ours optimizer(slots, options);
  for (int step = 0; step < 3; ++step) {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      set_grad(slots[i], at::view_as_complex(gradient(i, step)));
    }
    optimizer.step();
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const at::Tensor full = full_tensor(slots[i]->get()).detach();
    ASSERT_EQ(full.scalar_type(), at::kComplexFloat);
    EXPECT_CLOSE(at::view_as_real(full), expected[i].detach(), 1e-5, 1e-6) << i;
  }
  for (const StateTensor& state : optimizer.state()) {
    if (state.name != "step") {
      EXPECT_EQ(state.tensor.sizes(), state.slot->persistent().sizes());
      EXPECT_TRUE(state.tensor.is_complex());
    }
  }
}

/// Plain, and as shards of 4 ranks, some of them empty.
template <class Ours, class Reference, class Options, class ReferenceOptions>
void expect_as_libtorch(const Options& options, const ReferenceOptions& reference_options) {
  const std::vector<at::Tensor> expected = trained_pairs<Reference>(reference_options);
  expect_trained<Ours>([](const at::Tensor& tensor) { return slot_of(tensor); }, options, expected);
  RunOnMesh({4}, {"dp"}, [&](const DeviceMesh& mesh) {
    expect_trained<Ours>(
        [&](const at::Tensor& tensor) { return slot_of(tensor, mesh, {Shard{0}}); }, options,
        expected);
  });
}

TEST(ComplexParameters, AreUpdatedByAdamWAsPairsOfRealOnes) {
  expect_as_libtorch<AdamW, torch::optim::AdamW>(
      AdamWOptions{.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1},
      torch::optim::AdamWOptions(1e-2).betas({0.9, 0.95}).eps(1e-8).weight_decay(0.1));
}

TEST(ComplexParameters, AreUpdatedBySgdAsPairsOfRealOnes) {
  expect_as_libtorch<Sgd, torch::optim::SGD>(
      SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.2},
      torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.2));
}

TEST(ComplexParameters, HaveTheirGradientIfConjugatedLazily) {
  const nn::SlotPtr slot = slot_of(at::view_as_complex(value(0)));
  slot->persistent().mutable_grad() = at::view_as_complex(gradient(0, 0)).conj();
  const at::Tensor expected =
      slot->persistent().detach().sub(slot->persistent().grad().resolve_conj(), 0.5);
  Sgd({slot}, {.lr = 0.5}).step();
  EXPECT_CLOSE(slot->persistent().detach(), expected, 1e-6, 1e-7);
}

/// The norm of |z| over all elements.
double norm_of_absolutes(double p) {
  double sum = 0;
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    const at::Tensor squares = gradient(i, 0).to(at::kDouble).square().sum(-1);
    const at::Tensor absolutes = squares.sqrt();
    sum = std::isinf(p) ? std::max(sum, absolutes.max().item<double>())
                        : sum + absolutes.pow(p).sum().item<double>();
  }
  return std::isinf(p) ? sum : std::pow(sum, 1 / p);
}

TEST_ON_MESH(ComplexParameters, AreClippedByTheirAbsoluteValues, {4}, {"dp"}) {
  for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    std::vector<nn::SlotPtr> slots;
    for (std::size_t i = 0; i < kSizes.size(); ++i) {
      slots.push_back(slot_of(at::view_as_complex(value(i)), mesh, {Shard{0}}));
      set_grad(slots[i], at::view_as_complex(gradient(i, 0)));
    }
    const double norm = norm_of_absolutes(p);
    EXPECT_NEAR(clip_grad_norm_(slots, 0.5, {.norm_type = p}).item<double>(), norm, 1e-5 * norm);
    const at::Tensor clipped = full_tensor(slots[0]->persistent().grad());
    EXPECT_CLOSE(at::view_as_real(clipped), gradient(0, 0).mul(0.5 / norm), 1e-4, 1e-6);
  }
}

TEST(ComplexParameters, AreNotForMuon) {
  const std::vector<nn::SlotPtr> slots{slot_of(at::view_as_complex(value(0)))};
  EXPECT_ERROR(Muon(slots, {}), "Muon", "ComplexFloat", "AdamW");
}

}  // namespace complex_test
}  // namespace tessera::optim
