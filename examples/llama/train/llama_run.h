// What llama_train trains and how a step of it is made. llama_plan makes the same in a fake world.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "examples/llama/models.h"
#include "examples/llama/train/options/train_options.h"
#include "examples/llama/train/training_data.h"
#include "tessera/training/step.h"
#include "tessera/training/step_meter.h"

namespace llama {

/// A run's data, model and optimizer, of its flags. The constructor and every method are collective
/// over `world`.
struct LlamaRun {
  /// The model is filled from --model or by --seed; with `loads` a checkpoint replaces its values
  /// afterwards. Throws tessera::Error for what the flags,
  /// files or data refuse.
  LlamaRun(TrainOptions run_options, tessera::comm::WorldPtr run_world, bool loads = false);

  /// Makes the next step; all of its metrics but the throughput.
  tessera::observe::StepMetrics step();
  /// The loss of micro-batch `i` of this rank's rows: their mean, or with loss.tokens their
  /// share of a sum.
  at::Tensor loss_of(const tessera::data::BatchLoader::Batch& batch, std::int64_t i,
                     const tessera::tensor_parallel::CrossEntropyOptions& loss = {});
  /// What --label-smoothing and --z-loss say.
  tessera::tensor_parallel::CrossEntropyOptions loss_options() const;
  /// This rank's rows of a batch, on its device.
  tessera::data::BatchLoader::Batch own_rows(tessera::data::BatchLoader::Batch batch) const;
  bool is_main() const { return world->rank() == 0; }
  bool uses_cuda() const { return options.device == "cuda"; }

  TrainOptions options;
  tessera::comm::WorldPtr world;
  tessera::DeviceMesh mesh;
  tessera::DeviceMesh batch_ranks;  ///< 1-D: the ranks that hold different sequences
  tessera::DeviceMesh data_ranks;   ///< 1-D: the ranks that hold different tokens
  Config config;
  TrainingData data;
  std::vector<tessera::data::RowRange> rows;  ///< this rank's of each batch, by micro-batch
  std::shared_ptr<Llama> model;
  std::unique_ptr<tessera::optim::Optimizer> optimizer;
  tessera::training::TrainState state;

 private:
  std::optional<tessera::data::PrefetchLoader> prefetch_;
  tessera::training::StepOptions step_options_;
  tessera::training::StepMeter meter_;
};

/// The mean loss of the held-out data with the weights as they are; nullopt if `stop`, which is
/// asked after each batch, says so. Collective.
std::optional<double> held_out_loss(LlamaRun& run, const std::function<bool()>& stop);
void print_held_out_loss(const LlamaRun& run, double loss);

/// --verify: one sample of each data-parallel rank, forward and backward, beside one rank's model.
/// Returns what was compared. Throws tessera::Error unless this mesh computes what one rank does.
/// Collective.
std::string verify(LlamaRun& run);

}  // namespace llama
