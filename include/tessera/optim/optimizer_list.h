#pragma once

#include <memory>
#include <vector>

#include "tessera/export.h"
#include "tessera/optim/optimizer.h"

TESSERA_API_BEGIN
namespace tessera::optim {

/// Several optimizers as one, each with its own parameters:
///   const optim::MuonSplit split = optim::split_for_muon(model, {"lm_head.weight"});
///   optim::OptimizerList optimizer(
///       {std::make_shared<optim::Muon>(split.matrices, optim::MuonOptions{.lr = 0.02}),
///        std::make_shared<optim::AdamW>(split.rest, optim::AdamWOptions{.lr = 3e-4})});
/// They step in the order given.
class OptimizerList : public Optimizer {
 public:
  /// Throws Error for a parameter that two of them update, and for a null optimizer.
  explicit OptimizerList(std::vector<std::shared_ptr<Optimizer>> optimizers);

  const std::vector<nn::SlotPtr>& parameters() const override { return parameters_; }
  void scale_lr(double factor) override;
  std::vector<StateTensor> state() override;

 private:
  void update(double gradient_factor) override;
  void update_scaled(const at::Tensor& gradient_factor) override;

  std::vector<std::shared_ptr<Optimizer>> optimizers_;
  std::vector<nn::SlotPtr> parameters_;
};

}  // namespace tessera::optim
TESSERA_API_END
