// Muon on one process beside what is published.

#include <algorithm>
#include <cmath>

#include "optim/parameters.h"
#include "tessera/optim/muon.h"

namespace tessera::optim {
namespace {

at::Tensor wave(at::IntArrayRef sizes, double first, double frequency) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat)
      .add(first)
      .mul(frequency)
      .view(sizes);
}

// What torch.optim.Muon of torch 2.11 made of the same parameters and gradients. It iterates in
// bf16, whose sums differ with the processor: a part in a hundred of the updates' size.
TEST(Muon, AgreesWithPyTorch) {
  struct Case {
    std::vector<std::int64_t> sizes;
    MuonRate rate;
    std::vector<float> expected;
  };
  const std::vector<Case> cases{
      {{3, 5},
       MuonRate::kOriginal,
       {-0.11285F, 0.47732F, 1.01572F, 0.95869F, 0.38124F, -0.41667F, -0.81561F, -0.92222F,
        -0.53777F, -0.1066F, 0.60701F, 1.07574F, 0.93754F, 0.19476F, -0.45672F}},
      {{3, 5},
       MuonRate::kMatchRmsAdamW,
       {-0.05047F, 0.54864F, 0.96695F, 0.87785F, 0.34478F, -0.36885F, -0.81821F, -0.92358F,
        -0.56893F, -0.03892F, 0.61328F, 0.99521F, 0.86391F, 0.25312F, -0.39492F}},
      {{6, 2},
       MuonRate::kOriginal,
       {-0.27649F, 0.56501F, 1.19164F, 0.98939F, 0.14081F, -0.5913F, -0.78487F, -0.65393F,
        -0.48036F, -0.18824F, 0.38816F, 1.00761F}},
      {{6, 2},
       MuonRate::kMatchRmsAdamW,
       {-0.0782F, 0.59464F, 1.00221F, 0.86249F, 0.26594F, -0.40402F, -0.81029F, -0.8481F, -0.56196F,
        -0.04189F, 0.55324F, 0.95199F}}};
  for (const Case& c : cases) {
    const nn::SlotPtr slot = slot_of(wave(c.sizes, 0, 0.7).sin());
    Muon optimizer(
        {slot},
        {.lr = 0.1, .weight_decay = 0.2, .momentum = 0.9, .nesterov = true, .rate = c.rate});
    for (int step = 0; step < 3; ++step) {
      set_grad(slot, wave(c.sizes, 5 * step, 1.3).cos());
      optimizer.step();
    }
    const at::Tensor expected = at::tensor(c.expected).view(c.sizes);
    EXPECT_CLOSE(slot->get().detach(), expected, 0.0, 0.01)
        << (slot->get().detach() - expected).abs().max();
  }
}

// The published bounds: singular values of about 0.7 to 1.2 whatever those of the gradient.
TEST(Muon, MakesTheUpdateNearlyOrthogonal) {
  for (const auto& sizes : {std::vector<std::int64_t>{6, 9}, {9, 6}, {5, 5}}) {
    const nn::SlotPtr slot = slot_of(at::zeros(sizes));
    Muon optimizer({slot}, {.lr = 1.0,
                            .weight_decay = 0.0,
                            .rate = MuonRate::kMatchRmsAdamW,
                            .compute_dtype = at::kFloat});
    set_grad(slot, normal_values(sizes, 3));
    optimizer.step();
    const double rate = 0.2 * std::sqrt(static_cast<double>(std::max(sizes[0], sizes[1])));
    const at::Tensor values =
        std::get<1>(at::linalg_svd(slot->get().detach() / rate, /*full_matrices=*/false));
    EXPECT_GT(values.min().item<double>(), 0.3);
    EXPECT_LT(values.max().item<double>(), 1.3);
  }
}

}  // namespace
}  // namespace tessera::optim
