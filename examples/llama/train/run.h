// A run of llama_train: its model, data, optimizer and outputs.
#pragma once

#include <nlohmann/json.hpp>
#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "examples/llama/start.h"
#include "examples/llama/train/options.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/comm/world.h"
#include "tessera/core/process.h"
#include "tessera/data/batch_loader.h"
#include "tessera/data/tokenizer.h"
#include "tessera/nn/lora.h"
#include "tessera/planning/plan.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/training/checkpointer.h"
#include "tessera/training/recording.h"
#include "tessera/training/step.h"

namespace llama {

/// Selects the kernels of this process according to the flags. Call choose_kernels() before the
/// first use of a device.
void choose_kernels(const TrainOptions& options);

/// Creates the mesh (dp, tp) of the run, with dp_replicate and cp if they are above 1. Throws
/// tessera::Error unless the product of the degrees equals the number of ranks.
tessera::DeviceMesh make_mesh(const TrainOptions& options, const tessera::comm::WorldPtr& world);

/// The configuration of --model or --config, cut to --layers layers. Throws tessera::Error, before
/// memory is allocated, for a --seq above both a million tokens and the model's positions, and for
/// heads that cannot be split over --tp.
Config model_config(const TrainOptions& options);

/// Throws the errors of model_config(), and Error for --lora-targets and --freeze that don't fit
/// the model. Needs no world: an error that all ranks have is found before the ranks connect, so
/// that no rank reports a missing rank.
void check_model(const TrainOptions& options);

/// Replaces --ac auto by the least recomputation whose planned memory fits into --memory, or into
/// the smallest GPU of all ranks; if nothing fits, by "full". Prints the choice on rank 0, which
/// runs llama_plan. Throws tessera::Error on all ranks if the plan fails. Collective over `world`
/// with --ac auto.
TrainOptions with_chosen_ac(TrainOptions options, tessera::comm::World& world);

/// Creates the parallelized model with memory for this rank's shards, whose values are not yet set.
std::shared_ptr<Llama> make_model(const TrainOptions& options, const Config& config,
                                  const tessera::DeviceMesh& mesh);

/// Creates the model on the meta device, not yet parallelized, with adapters and frozen parameters
/// according to the flags.
std::shared_ptr<Llama> make_meta_model(const TrainOptions& options, const Config& config);

/// Creates the model of the run for one rank, on the meta device, with parameters of the type in
/// which the mesh computes.
std::shared_ptr<Llama> make_reference(const TrainOptions& options, const Config& config);

/// With context parallelism, returns this rank's tokens of `batch` with the positions of all
/// tokens; otherwise returns `batch`.
tessera::data::BatchLoader::Batch tokens_of_rank(const Llama& model,
                                                 tessera::data::BatchLoader::Batch batch);

/// The loss of `rows`, computed in chunks of tokens if --loss-chunks or the size of the logits
/// requires it. Collective with tp > 1.
at::Tensor loss_of_rows(Llama& model, const TrainOptions& options,
                        const tessera::data::BatchLoader::Batch& rows,
                        const tessera::tensor_parallel::CrossEntropyOptions& loss);

/// Creates the optimizer that --optimizer and its further flags describe.
std::unique_ptr<tessera::optim::Optimizer> make_optimizer(const TrainOptions& options,
                                                          const Llama& model);
/// FLOPs per token of a training step. Gradients that are not computed are not counted: of weights
/// that --freeze or --lora-rank leaves untrained, and of inputs before the first trained weight.
tessera::observe::ModelFlops flops_of(const TrainOptions& options, const Config& config);
/// FLOP/s of a rank's device, from --peak-flops or the data sheet; nullopt if unknown. Measuring is
/// collective over `world`.
std::optional<double> peak_flops_of(const TrainOptions& options, tessera::comm::World& world);
/// The learning-rate schedule that --schedule and its further flags describe.
tessera::optim::LrSchedule make_schedule(const TrainOptions& options);

/// The files that --save-hf copies next to the weights: the files of --model, with the tokenizer of
/// --tokenizer instead of the model's own. nullopt if neither flag is given: the folder's own files
/// are unchanged.
std::optional<tessera::checkpoint::FilesBesideWeights> files_beside_weights(
    const TrainOptions& options);

/// The tokens of a run, in batches.
struct TrainingData {
  /// Tokenizer of the run; nullptr if the run reads no text.
  tessera::data::TokenizerPtr tokenizer;
  /// Loads the training batches; nullptr with --steps 0.
  std::shared_ptr<const tessera::data::BatchLoader> loader;
  tessera::data::TokenSourcePtr eval_text;  ///< tokens of --eval-text, whose bytes are counted for
                                            ///< the loss per byte
  std::shared_ptr<const tessera::data::BatchLoader>
      eval_loader;  ///< nullptr without --eval-text or --eval-tokens
  nlohmann::json samples = nlohmann::json::object();  ///< the settings by which files are cut into
                                                      ///< samples
};

/// Opens the data that the flags name. Throws tessera::Error for data that cannot be read or do not
/// fit the model.
TrainingData open_training_data(const TrainOptions& options, const Config& config);

/// The fingerprint of everything that samples depend on: files, tokenizer, tokens around texts,
/// sizes. Saved in checkpoints. Reads a part of each file.
nlohmann::json data_fingerprint(const TrainOptions& options, const TrainingData& data);

/// The first difference between a checkpoint's and a run's data, by their fingerprints; "" if there
/// is none.
std::string data_change(nlohmann::json saved, nlohmann::json now);

/// Throws tessera::Error unless all ranks have the same data, including the held-out text. The
/// message has the first rank whose data differ from rank 0's, and the difference. Collective over
/// `world`.
void check_same_data(const TrainOptions& options, const TrainingData& data,
                     tessera::comm::World& world);

/// A run's data, model and optimizer, created from its flags. The constructor and all methods that
/// compute are collective over `world`.
struct LlamaRun {
  /// Fills the model from --model or by --seed; `loads`: whether a checkpoint will replace the
  /// values. Throws tessera::Error for wrong flags, files or data.
  LlamaRun(TrainOptions run_options, tessera::comm::WorldPtr run_world, bool loads = false);

  /// Runs the next step, and returns all its metrics except the throughput.
  tessera::observe::StepMetrics step();
  /// The loss of micro-batch `i` of this rank's rows: the mean or, with loss.tokens, this rank's
  /// share of a sum.
  at::Tensor loss_of(const tessera::data::BatchLoader::Batch& batch, std::int64_t i,
                     const tessera::tensor_parallel::CrossEntropyOptions& loss = {});
  /// The loss options of --label-smoothing and --z-loss.
  tessera::tensor_parallel::CrossEntropyOptions loss_options() const;
  /// The rows of a batch that this rank computes, on the rank's device.
  tessera::data::BatchLoader::Batch own_rows(tessera::data::BatchLoader::Batch batch) const;
  bool is_main() const { return world->rank() == 0; }
  bool uses_cuda() const { return options.device == "cuda"; }

  TrainOptions options;
  tessera::comm::WorldPtr world;
  tessera::DeviceMesh mesh;
  tessera::DeviceMesh batch_ranks;  ///< 1-D mesh of the ranks with different sequences
  tessera::DeviceMesh data_ranks;   ///< 1-D mesh of the ranks with different tokens
  Config config;
  TrainingData data;
  std::vector<tessera::data::RowRange> rows;  ///< this rank's rows of each batch, by micro-batch
  std::shared_ptr<Llama> model;
  std::unique_ptr<tessera::optim::Optimizer> optimizer;
  tessera::training::TrainState state;

 private:
  std::optional<tessera::data::PrefetchLoader> prefetch_;
  tessera::training::StepOptions step_options_;
  tessera::training::StepMeter meter_;
};

/// The mean loss of the held-out data with the current weights; nullopt if `stop`, which is called
/// after each batch, returns true. Collective.
std::optional<double> held_out_loss(LlamaRun& run, const std::function<bool()>& stop);
void print_held_out_loss(const LlamaRun& run, double loss);

/// Implements --verify: compares forward and backward on the mesh with the one-rank model, with one
/// sample per data-parallel rank. Returns a description of what was compared. Throws tessera::Error
/// if the mesh's results differ from one rank's. Collective.
std::string verify(LlamaRun& run);

/// The run of `options` in a comm::fake_world of its ranks, or in a world on this CPU. The run
/// reads only the model's configuration and writes nothing. Throws tessera::Error for options that
/// llama_train rejects.
tessera::planning::Run planned_run(const TrainOptions& options,
                                   const tessera::comm::WorldPtr& world);

/// Creates or checks all outputs before the training. Collective; a failure on rank 0 is an error
/// on all ranks.
void prepare_outputs(const LlamaRun& run, tessera::training::Checkpointer& checkpoints,
                     tessera::training::MetricLog& log);

/// Prints the mesh, the model, and the first step of the run.
void print_start(const LlamaRun& run, const tessera::training::Checkpointer& checkpoints,
                 std::optional<double> peak_flops);

/// Exports the weights as --save-lora, --merge-lora and --save-hf request. Collective.
void export_weights(LlamaRun& run);

/// Writes run.json, the record of the run, next to the file of --metrics.
void write_record(const LlamaRun& run);

/// Claims the folder of --output-dir for this run, and writes the flags to config.toml, or for a
/// resumed run to config-2.toml and so on. `goes_on`: whether a step was loaded. With --resume
/// auto, a run that ended before its first save starts again with the same flags. Throws
/// tessera::Error if the folder belongs to another run, including a run that starts at the same
/// time, or if the folder cannot be written. Call take_run_folder() on rank 0.
void take_run_folder(const TrainOptions& options, bool goes_on);

/// The JSON entries that each saved step contains. Reads a part of each data file.
nlohmann::json checkpoint_entries(const LlamaRun& run);

/// Loads the run's state. Throws tessera::Error if the checkpoint's data, model or fine-tuning
/// flags differ from the run's `entries`. Collective.
void load_checkpoint(LlamaRun& run, tessera::training::Checkpointer& checkpoints,
                     const nlohmann::json& entries);

/// The LoRA options that --lora-rank and its further flags describe.
tessera::nn::LoraOptions lora_options(const TrainOptions& options);

/// The flags, other than the model's config.json, on which a step and the optimizer's state depend:
/// a JSON object of names and values, without flags that are off. Saved in checkpoints.
nlohmann::json fine_tuning_record(const TrainOptions& options);

/// Runs llama_train with all its outputs. `signals`: after a signal, the run finishes the current
/// step or evaluation batch, saves a checkpoint and ends; nullptr: signals are ignored. Returns
/// false if a signal ended the run. Collective over `world`; a failure on one rank throws on that
/// rank.
bool train(const TrainOptions& given, const tessera::comm::WorldPtr& world,
           const tessera::StopSignals* signals = nullptr);

}  // namespace llama
