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

/// Sets the kernels of this process by the flags. Call it before any use of a device.
void choose_kernels(const TrainOptions& options);

/// The mesh (dp, tp) of the run, with dp_replicate and cp where these are above 1. Throws
/// tessera::Error unless the product of the degrees is the number of ranks.
tessera::DeviceMesh make_mesh(const TrainOptions& options, const tessera::comm::WorldPtr& world);

/// The model that --model or --config describes, with at most --layers of its layers. Throws
/// tessera::Error for a --seq beyond a million tokens and its positions, before memory is asked
/// for, and for heads that --tp doesn't divide.
Config model_config(const TrainOptions& options);

/// Throws what model_config() throws, and refuses --lora-targets and --freeze that don't fit the
/// model. Needs no world: errors of all ranks are found before they connect, so that no rank
/// reports a missing peer.
void check_model(const TrainOptions& options);

/// The model, parallelized, with memory for this rank's shards, which have no values yet.
std::shared_ptr<Llama> make_model(const TrainOptions& options, const Config& config,
                                  const tessera::DeviceMesh& mesh);

/// The model on the meta device, not parallel yet: with adapters, and frozen as the flags say.
std::shared_ptr<Llama> make_meta_model(const TrainOptions& options, const Config& config);

/// The same model of one rank, on the meta device, with parameters of the type that the mesh
/// computes in.
std::shared_ptr<Llama> make_reference(const TrainOptions& options, const Config& config);

/// With context parallelism this rank's tokens of `batch`, with the positions of all tokens; else
/// `batch`.
tessera::data::BatchLoader::Batch tokens_of_rank(const Llama& model,
                                                 tessera::data::BatchLoader::Batch batch);

/// The loss of `rows`, in chunks of tokens where --loss-chunks or the size of the logits says so.
/// Collective with tp > 1.
at::Tensor loss_of_rows(Llama& model, const TrainOptions& options,
                        const tessera::data::BatchLoader::Batch& rows,
                        const tessera::tensor_parallel::CrossEntropyOptions& loss);

/// The optimizer of --optimizer and its flags.
std::unique_ptr<tessera::optim::Optimizer> make_optimizer(const TrainOptions& options,
                                                          const Llama& model);
/// FLOPs a token of a training step, without gradients that no step needs: of weights that --freeze
/// or
/// --lora-rank leaves untrained, and of inputs before the first trained weight.
tessera::observe::ModelFlops flops_of(const TrainOptions& options, const Config& config);
/// FLOP/s of a rank's device, by --peak-flops or its data sheet; nullopt if unknown. Measuring is
/// collective over `world`.
std::optional<double> peak_flops_of(const TrainOptions& options, tessera::comm::World& world);
/// The schedule of --schedule and its flags.
tessera::optim::LrSchedule make_schedule(const TrainOptions& options);

/// What --save-hf copies together with the weights: the files of --model, with those of --tokenizer
/// instead of its own. nullopt if neither is given: files that the folder has stay.
std::optional<tessera::checkpoint::FilesBesideWeights> files_beside_weights(
    const TrainOptions& options);

/// The tokens of a run, in batches.
struct TrainingData {
  tessera::data::TokenizerPtr tokenizer;                     ///< none without text
  std::shared_ptr<const tessera::data::BatchLoader> loader;  ///< none with --steps 0
  tessera::data::TokenSourcePtr eval_text;  ///< tokens of --eval-text, whose bytes are counted
  std::shared_ptr<const tessera::data::BatchLoader>
      eval_loader;                                    ///< none without --eval-text or --eval-tokens
  nlohmann::json samples = nlohmann::json::object();  ///< how files are cut into samples
};

/// Throws tessera::Error for data that can't be read, or are not for this model.
TrainingData open_training_data(const TrainOptions& options, const Config& config);

/// The data that the samples of a step depend on: files, tokenizer, tokens around texts, sizes. For
/// checkpoints. Reads a part of each file.
nlohmann::json data_fingerprint(const TrainOptions& options, const TrainingData& data);

/// The first difference between the data of a checkpoint and of a run, by their fingerprints; "" if
/// there is none.
std::string data_change(nlohmann::json saved, nlohmann::json now);

/// Throws tessera::Error unless all ranks have the same data, the held-out text included. Names the
/// first rank whose data are not those of rank 0, and how they differ. Collective over `world`.
void check_same_data(const TrainOptions& options, const TrainingData& data,
                     tessera::comm::World& world);

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
  /// The options of --label-smoothing and --z-loss.
  tessera::tensor_parallel::CrossEntropyOptions loss_options() const;
  /// This rank's rows of a batch, on its device.
  tessera::data::BatchLoader::Batch own_rows(tessera::data::BatchLoader::Batch batch) const;
  bool is_main() const { return world->rank() == 0; }
  bool uses_cuda() const { return options.device == "cuda"; }

  TrainOptions options;
  tessera::comm::WorldPtr world;
  tessera::DeviceMesh mesh;
  tessera::DeviceMesh batch_ranks;  ///< 1-D: the ranks with different sequences
  tessera::DeviceMesh data_ranks;   ///< 1-D: the ranks with different tokens
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

/// The mean loss of the held-out data with the current weights; nullopt if `stop`, which is called
/// after each batch, returns true. Collective.
std::optional<double> held_out_loss(LlamaRun& run, const std::function<bool()>& stop);
void print_held_out_loss(const LlamaRun& run, double loss);

/// --verify: one sample of each data-parallel rank, forward and backward, is compared with one
/// rank's model. Returns what was compared. Throws tessera::Error unless this mesh computes what
/// one rank does. Collective.
std::string verify(LlamaRun& run);

/// The run of `options` in a comm::fake_world of its ranks, or in a world of this CPU. It reads the
/// model's configuration, and no other file; it writes none. Throws
/// tessera::Error for what llama_train refuses.
tessera::planning::Run planned_run(const TrainOptions& options,
                                   const tessera::comm::WorldPtr& world);

/// Creates or checks all outputs before the training. Collective; a failure on rank 0 is an error
/// on all ranks.
void prepare_outputs(const LlamaRun& run, tessera::training::Checkpointer& checkpoints,
                     tessera::training::MetricLog& log);

/// The mesh, the model, and the first step of the run.
void print_start(const LlamaRun& run, const tessera::training::Checkpointer& checkpoints,
                 std::optional<double> peak_flops);

/// --save-lora, --merge-lora and --save-hf. Collective.
void export_weights(LlamaRun& run);

/// run.json of --metrics.
void write_record(const LlamaRun& run);

/// Claims the folder of --output-dir for this run, and writes its flags to config.toml, or to
/// config-2.toml and so on for a resumed run. `goes_on`: whether a step was loaded; a run of
/// --resume auto that ended before its first save begins again with the same flags. Throws
/// tessera::Error if the folder has another run, also one that begins at the same time, or can't be
/// written. For rank 0.
void take_run_folder(const TrainOptions& options, bool goes_on);

/// The entries of each saved step. Reads a part of each data file.
nlohmann::json checkpoint_entries(const LlamaRun& run);

/// Fills the run's state. Throws tessera::Error if the checkpoint's data, model or flags of
/// fine-tuning are not those of the run's `entries`. Collective.
void load_checkpoint(LlamaRun& run, tessera::training::Checkpointer& checkpoints,
                     const nlohmann::json& entries);

/// The adapters of --lora-rank, with defaults.
tessera::nn::LoraOptions lora_options(const TrainOptions& options);

/// The flags, besides the model's config.json, that a step and the optimizer's state depend on: an
/// object of names and values, without flags that are off. For checkpoints.
nlohmann::json fine_tuning_record(const TrainOptions& options);

/// A run of llama_train with all its outputs. `signals`: after a signal the run saves a checkpoint
/// and ends, after the current step or batch of evaluation; nullptr: no signals. False if a signal
/// ended it. Collective over `world`; a failure on one rank throws there.
bool train(const TrainOptions& options, const tessera::comm::WorldPtr& world,
           const tessera::StopSignals* signals = nullptr);

}  // namespace llama
