#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "examples/llama/model.h"
#include "examples/llama/train_options.h"

namespace llama {

/// One training run: builds, splits and fills the model, steps it, and writes what was asked for.
/// Construction and every method are collective over `world`; a failure on one rank is thrown
/// there, and World::abort tells the others.
class Trainer {
 public:
  Trainer(TrainOptions options, tessera::comm::WorldPtr world);
  /// All steps, then the evaluation, the exported weights and the report.
  void run();

 private:
  void prepare_outputs();
  void build_model();
  void open_data();
  tessera::observe::StepMetrics step(std::int64_t index);
  /// Forward and backward of this rank's part of a step, micro-batch by micro-batch; its mean loss.
  at::Tensor accumulate_gradients(std::int64_t step);
  /// The mean loss of one of this rank's micro-batches of a step.
  at::Tensor loss_of(const tessera::data::BatchLoader& loader, std::int64_t step,
                     std::int64_t micro_batch);
  /// Mean over the data-parallel ranks of a scalar that is equal on the ranks of each tp group.
  at::Tensor mean_over_data(const at::Tensor& value) const;
  void check_finite(const tessera::observe::StepMetrics& metrics) const;
  void log(const tessera::observe::StepMetrics& metrics);
  void evaluate();
  void write_outputs();
  bool is_main() const { return world_->rank() == 0; }

  TrainOptions options_;
  tessera::comm::WorldPtr world_;
  tessera::DeviceMesh mesh_;
  tessera::DeviceMesh data_mesh_;  ///< 1-D: the ranks that hold different data
  Config config_;
  std::shared_ptr<Llama> model_;
  std::vector<tessera::nn::SlotPtr> parameters_;
  std::unique_ptr<tessera::optim::AdamW> optimizer_;
  tessera::optim::GradScaler scaler_;
  std::optional<tessera::optim::LrSchedule> schedule_;
  tessera::data::TokenizerPtr tokenizer_;
  std::unique_ptr<tessera::data::BatchLoader> loader_;
  std::string eval_text_;
  std::unique_ptr<tessera::data::BatchLoader> eval_loader_;
  std::unique_ptr<tessera::observe::MetricsWriter> writer_;
  std::unique_ptr<tessera::observe::Progress> progress_;
  std::vector<tessera::observe::StepMetrics> history_;
};

}  // namespace llama
