#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "tessera/export.h"
#include "tessera/optim/optimizer.h"

TESSERA_API_BEGIN
namespace tessera::optim {

/// An optimizer that also keeps an exponential moving average of the parameters that are trained
/// (Polyak & Juditsky 1992): after each step of `inner`, average = decay * average + (1 - decay) *
/// parameter. The average begins as the parameters are before the first step, unless a load has
/// filled it. It is kept beside the local shards, in fp32 where these are narrower, and is part of
/// the state as "ema": checkpoints hold it, and a resumed run continues it exactly. It needs no
/// communication.
class Ema final : public Optimizer {
 public:
  /// Throws Error unless 0 <= decay < 1, and for no optimizer.
  Ema(std::shared_ptr<Optimizer> inner, double decay);

  const std::vector<nn::SlotPtr>& parameters() const override { return inner_->parameters(); }
  void scale_lr(double factor) override { inner_->scale_lr(factor); }
  std::vector<StateTensor> state() override;

  /// Exchanges the parameters with their averages, for evaluation or an export; a second call gives
  /// them back: in between, step() and state() throw Error. Not to be called between a forward and
  /// its backward. Not collective. Throws Error, before anything is changed, for parameters
  /// narrower than fp32, which would not come back as they were.
  void swap();

 private:
  void update(double gradient_factor) override;
  void update_scaled(const at::Tensor& gradient_factor) override;
  template <class Factor>
  void step_inner(const Factor& gradient_factor);
  void average();
  void make_averages();
  void begin_averages();
  void check_not_swapped() const;
  void check_sizes(std::size_t index) const;

  std::shared_ptr<Optimizer> inner_;
  double decay_;
  std::vector<at::Tensor> averages_;  ///< beside parameters(); undefined for frozen ones
  bool swapped_ = false;              ///< the parameters are the averages now
};

}  // namespace tessera::optim
TESSERA_API_END
