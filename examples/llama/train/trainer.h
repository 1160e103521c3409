// The life of a training run, from the options to the report.

#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "examples/llama/models.h"
#include "examples/llama/train/checkpoints.h"
#include "examples/llama/train/observation/observation.h"
#include "examples/llama/train/options/train_options.h"
#include "examples/llama/train/training_data.h"
#include "tessera/data/batch_loader.h"
#include "tessera/data/prefetch_loader.h"

namespace llama {

/// One training run: builds, parallelizes and fills the model, trains it, and writes the outputs
/// that the options ask for. The constructor and every method are collective over `world`. A
/// failure on one rank throws there; World::abort tells the others.
class Trainer {
 public:
  /// `apply`: as ParallelOptions has it. `signals`: end the run after its step where they come, or
  /// before the first; nullptr: none does. They outlive the run.
  Trainer(TrainOptions options, tessera::comm::WorldPtr world, const ApplyPlan& apply = {},
          const tessera::StopSignals* signals = nullptr);
  /// The steps that are left, then the evaluation, the exported weights and the report. False if it
  /// was told to stop before, and has saved a checkpoint.
  bool run();

 private:
  friend class PlannedRun;  ///< makes its steps one by one, without values

  void prepare_outputs();
  void open_outputs();
  void build_model(const ApplyPlan& apply);
  void fill_model();
  RunState state() { return {*model_, *optimizer_, scaler_, position_}; }
  /// False if it was told to stop.
  bool train();
  tessera::observe::StepMetrics step();
  /// Forward and backward of this rank's rows of the next step. Returns the mean loss of its
  /// micro-batches, and notes how long it waited for the rows.
  at::Tensor accumulate_gradients(tessera::observe::StepMetrics& metrics);
  void save_checkpoint(bool stopped);
  void save_last();
  void note_last_stall();
  /// The same on all ranks, or some would go on and wait for the others.
  bool told_to_stop();
  /// The mean loss of one of the micro-batches of this rank's rows.
  at::Tensor loss_of(const tessera::data::BatchLoader::Batch& batch, std::int64_t micro_batch,
                     const tessera::tensor_parallel::CrossEntropyOptions& options = {});
  /// Without what a batch says of its tokens.
  tessera::tensor_parallel::CrossEntropyOptions loss_of_training() const;
  /// Throws tessera::Error unless this mesh computes what one rank does.
  void verify();
  /// Mean over the data-parallel ranks of a scalar that is equal on the ranks of each tp group.
  at::Tensor mean_over_data(const at::Tensor& value) const;
  void check_finite(const tessera::observe::StepMetrics& metrics) const;
  [[noreturn]] void fail_in_step(const c10::Error& error) const;
  void log(const tessera::observe::StepMetrics& metrics);
  void log_to_tensorboard(const tessera::observe::StepMetrics& metrics);
  std::string attention_of_a_rank() const;
  std::string trained_share() const;
  std::string base_model() const;
  void print_start() const;
  /// The mean loss of the held-out data with the weights as they are: each rank evaluates its part
  /// of each batch. nullopt if it was told to stop.
  std::optional<double> evaluate();
  /// After a step, as --eval-every says. Training goes on as if nothing had been. False if it was
  /// told to stop.
  bool evaluate_if_due(tessera::observe::StepMetrics& metrics);
  /// False if it was told to stop.
  bool evaluate_at_end();
  void print_evaluation() const;
  void swap_averages();
  std::exception_ptr save_again_if_failed();
  void write_outputs();
  bool is_main() const { return world_->rank() == 0; }
  bool uses_cuda() const { return options_.device == "cuda"; }

  TrainOptions options_;
  tessera::comm::WorldPtr world_;
  Observation observation_;  ///< outlives the model, whose memory it counts
  tessera::DeviceMesh mesh_;
  tessera::DeviceMesh data_mesh_;  ///< 1-D: the ranks that hold different tokens
  Config config_;
  std::shared_ptr<Llama> model_;
  std::vector<tessera::nn::SlotPtr> parameters_;
  std::unique_ptr<tessera::optim::Optimizer> optimizer_;
  // Does nothing unless --param-dtype is fp16.
  tessera::optim::GradScaler scaler_;
  std::optional<tessera::optim::LrSchedule> schedule_;
  TrainingData data_;
  std::int64_t rows_ = 0, first_row_ = 0;  ///< of each batch, this rank's
  std::optional<tessera::data::PrefetchLoader> prefetch_;
  Position position_;
  std::unique_ptr<Checkpoints> checkpoints_;
  std::optional<double> eval_loss_;   ///< of the weights as the last step has left them, if known
  std::optional<double> peak_flops_;  ///< of a rank's device
  std::optional<double> stall_s_;     ///< of a checkpoint since the last step
  std::exception_ptr unsaved_;        ///< what the save of the last step has failed with
  const tessera::StopSignals* signals_;
  std::unique_ptr<tessera::observe::MetricsWriter> writer_;
  std::unique_ptr<tessera::observe::TensorBoardWriter> tensorboard_;
  std::unique_ptr<tessera::observe::Progress> progress_;
  /// Rank 0 only; for the report.
  std::vector<tessera::observe::StepMetrics> history_;
};

}  // namespace llama
