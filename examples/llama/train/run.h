// A run of llama_train: its model, data, optimizer and outputs.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "examples/llama/start.h"
#include "examples/llama/train/options.h"
#include "tessera/comm/world.h"
#include "tessera/core/process.h"
#include "tessera/data/batch_loader.h"
#include "tessera/data/tokenizer.h"
#include "tessera/nn/layers.h"
#include "tessera/planning/plan.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/training/step.h"

namespace llama {

/// Sets the kernel options of this process (deterministic mode, for example) by the flags. Call
/// choose_kernels() before the first use of a device.
void choose_kernels(const TrainOptions& options);

/// Returns the configuration of --model or --config, cut to --layers layers. Throws tessera::Error
/// for a --seq that is too long, and for heads that cannot be split over --tp. Allocates no
/// weights.
Config model_config(const TrainOptions& options);

/// Throws the errors of model_config(), and Error for --lora-targets and --freeze that don't fit
/// the model. Call before the ranks connect, so that other ranks do not wait for a failed rank.
void check_model(const TrainOptions& options);

/// Replaces --ac auto by the setting with the least recomputation that fits into memory, by the
/// plan; by "full" if no setting fits. The memory is --memory, or without --memory the smallest
/// GPU's. Throws tessera::Error on all ranks if the plan fails. Collective over `world` with --ac
/// auto.
TrainOptions with_chosen_ac(TrainOptions options, tessera::comm::World& world);

/// Returns the FLOPs per token of a training step. Omits gradients of untrained weights (--freeze,
/// --lora-rank), and input gradients before the first trained weight.
tessera::observe::ModelFlops flops_of(const TrainOptions& options, const Config& config);
/// Returns the FLOP/s of a rank's device, from --peak-flops or the data sheet; nullopt if unknown.
/// Collective over `world` with --peak-flops measure.
std::optional<double> peak_flops_of(const TrainOptions& options, tessera::comm::World& world);

struct TrainingData {
  /// The tokenizer of the run; nullptr if the run reads no text.
  tessera::data::TokenizerPtr tokenizer;
  std::shared_ptr<const tessera::data::BatchLoader> loader;
  tessera::data::TokenSourcePtr eval_text;
  std::shared_ptr<const tessera::data::BatchLoader> eval_loader;
  nlohmann::json samples = nlohmann::json::object();  ///< settings that determine the samples
};

/// Opens the data that the flags name. Throws tessera::Error for data that cannot be read or do not
/// fit the model.
TrainingData open_training_data(const TrainOptions& options, const Config& config);

/// Returns the fingerprint of everything that samples depend on: files, tokenizer, begin and end
/// tokens, sizes. Checkpoints save the fingerprint. Reads a part of each file.
nlohmann::json data_fingerprint(const TrainOptions& options, const TrainingData& data);

/// Describes the first difference between the data fingerprints of a checkpoint and of a run; "" if
/// there is no difference.
std::string data_change(nlohmann::json saved, nlohmann::json now);

/// Describes the first value of `now` that differs from `saved`: "files["t.bin"].bytes is 4 instead
/// of 3"; "" if both are equal. `at`: the path of `saved` and `now`.
std::string first_difference(const nlohmann::json& saved, const nlohmann::json& now,
                             const std::string& at = "");

/// Throws tessera::Error unless all ranks have the same data, including the held-out text. The
/// message names the first rank with different data. Collective over `world`.
void check_same_data(const TrainOptions& options, const TrainingData& data,
                     tessera::comm::World& world);

/// A run's data, model and optimizer, created from the run's flags. The constructor and all methods
/// that compute are collective over `world`.
struct LlamaRun {
  /// Sets the weights from the folder of --model, or at random by --seed. `loads`: whether a
  /// checkpoint will replace these weights. Throws tessera::Error for wrong flags, files or data.
  LlamaRun(TrainOptions run_options, tessera::comm::WorldPtr run_world, bool loads = false);

  /// Runs the next step, and returns all metrics of this step except the throughput.
  tessera::observe::StepMetrics step();
  /// Returns the loss of micro-batch `i` of this rank's sequences: the mean over its targets or,
  /// with loss.tokens, this rank's term of a sum over all ranks.
  at::Tensor loss_of(const tessera::data::BatchLoader::Batch& batch, std::int64_t i,
                     const tessera::tensor_parallel::CrossEntropyOptions& loss = {});
  tessera::tensor_parallel::CrossEntropyOptions loss_options() const;
  /// Returns this rank's sequences of a batch, on the rank's device.
  tessera::data::BatchLoader::Batch own_rows(tessera::data::BatchLoader::Batch batch) const;
  bool is_main() const { return world->rank() == 0; }
  bool uses_cuda() const { return options.device == "cuda"; }

  TrainOptions options;
  tessera::comm::WorldPtr world;
  tessera::DeviceMesh mesh;
  tessera::DeviceMesh batch_ranks;  ///< 1-D mesh of the ranks that have different sequences
  tessera::DeviceMesh data_ranks;   ///< 1-D mesh of the ranks that have different tokens
  Config config;
  TrainingData data;
  std::vector<tessera::data::RowRange> rows;  ///< index ranges of this rank's samples in each batch
  std::shared_ptr<Llama> model;
  std::unique_ptr<tessera::optim::Optimizer> optimizer;
  tessera::training::TrainState state;

 private:
  std::optional<tessera::data::PrefetchLoader> prefetch_;
  at::Tensor with_router_losses(const at::Tensor& loss);

  tessera::training::StepOptions step_options_;
  at::Tensor router_losses_;  ///< load-balancing loss and z-loss of this rank in this step
  double largest_expert_load_ = 0;
  tessera::training::StepMeter meter_;
};

/// Implements --verify: compares forward and backward on the mesh with the one-rank model, and
/// returns a description of the comparison. Throws tessera::Error if the results differ.
/// Collective.
std::string verify(LlamaRun& run);

/// Returns the planned run of `options`. `world`: a comm::fake_world with the ranks of the run, or
/// a world on this CPU. Writes nothing. Throws tessera::Error for options that llama_train rejects.
tessera::planning::Run planned_run(const TrainOptions& options,
                                   const tessera::comm::WorldPtr& world);
/// Returns the function for planning::PlanOptions::sizes, which describes a rank's part of the
/// batch and, with context parallelism, of the sequence.
std::function<std::vector<std::int64_t>(const std::vector<std::int64_t>& coordinate)> planned_sizes(
    const TrainOptions& options);

tessera::nn::LoraOptions lora_options(const TrainOptions& options);

/// Executes a run of llama_train with all its outputs. `signals`: after a signal, the run saves a
/// checkpoint and ends; nullptr: signals are ignored. Returns false if a signal ended the run.
/// Collective over `world`; a failure on one rank throws on that rank.
bool train(const TrainOptions& given, const tessera::comm::WorldPtr& world,
           const tessera::StopSignals* signals = nullptr);

}  // namespace llama
