#include "tessera/training/evaluation.h"

#include <c10/core/GradMode.h>

#include "tessera/core/error.h"
#include "tessera/optim/optimizer.h"
#include "tessera/training/step.h"

namespace tessera::training {

namespace {

/// Ends also where the loss throws.
class EvalMode {
 public:
  explicit EvalMode(nn::ModuleBase& model) : model_(model), was_training_(model.is_training()) {
    model_.eval();
  }
  ~EvalMode() { model_.train(was_training_); }
  EvalMode(const EvalMode&) = delete;
  EvalMode& operator=(const EvalMode&) = delete;

 private:
  nn::ModuleBase& model_;
  bool was_training_;
};

/// The same.
class Swapped {
 public:
  explicit Swapped(optim::Ema& ema) : ema_(ema) { ema_.swap(); }
  ~Swapped() { ema_.swap(); }
  Swapped(const Swapped&) = delete;
  Swapped& operator=(const Swapped&) = delete;

 private:
  optim::Ema& ema_;
};

}  // namespace

std::optional<double> evaluate(nn::ModuleBase& model, const DeviceMesh& data_mesh,
                               std::int64_t batches,
                               const std::function<at::Tensor(std::int64_t batch)>& loss,
                               const std::function<bool()>& stop) {
  TESSERA_CHECK(batches > 0, "evaluate: ", batches, " batches; give 1 or more");
  const c10::NoGradGuard no_grad;
  const EvalMode mode(model);
  double sum = 0;
  for (std::int64_t i = 0; i < batches; ++i) {
    sum += mean_over(loss(i), data_mesh).item<double>();
    if (stop && stop()) {
      return std::nullopt;
    }
  }
  return sum / static_cast<double>(batches);
}

void with_averaged_weights(optim::Optimizer& optimizer, const std::function<void()>& body) {
  auto* const ema = dynamic_cast<optim::Ema*>(&optimizer);
  if (ema == nullptr) {
    body();
    return;
  }
  const Swapped averages(*ema);
  body();
}

}  // namespace tessera::training
