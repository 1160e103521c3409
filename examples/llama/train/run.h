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

/// What the flags say of the kernels of this process. Before anything runs on a device.
void choose_kernels(const TrainOptions& options);

/// The mesh (dp, tp) of the run, with dp_replicate and cp where these are above 1. Throws
/// tessera::Error unless the product of the degrees is the number of ranks.
tessera::DeviceMesh make_mesh(const TrainOptions& options, const tessera::comm::WorldPtr& world);

/// The model that --model or --config describes, with at most --layers of its layers. Throws
/// tessera::Error for a --seq beyond a million tokens and its positions, before memory is asked
/// for, and for heads that --tp doesn't divide.
Config model_config(const TrainOptions& options);

/// Throws what model_config() throws, and refuses --lora-targets and --freeze that don't fit the
/// model. Needs no world: an error that all ranks have is best found before they meet, or the first
/// to end would have the others report that they miss it.
void check_model(const TrainOptions& options);

/// The model, parallelized, with memory for this rank's shards, which have no values yet.
std::shared_ptr<Llama> make_model(const TrainOptions& options, const Config& config,
                                  const tessera::DeviceMesh& mesh);

/// The model on the meta device, not parallel yet: with adapters, and frozen as the flags say.
std::shared_ptr<Llama> make_meta_model(const TrainOptions& options, const Config& config);

/// The same model of one rank, on the meta device, with parameters of the type that the mesh
/// computes in.
std::shared_ptr<Llama> make_reference(const TrainOptions& options, const Config& config);

/// With context parallelism this rank's tokens of `batch`, with the positions of all; else itself.
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
/// FLOPs a token of a training step. Where --freeze or --lora-rank leaves weights untrained,
/// without those of gradients that no step needs: of the weights themselves, and of all that lies
/// before the first trained one.
tessera::observe::ModelFlops flops_of(const TrainOptions& options, const Config& config);
/// FLOP/s of a rank's device, as --peak-flops says or by its data sheet; nullopt where that is not
/// known. Measuring is collective over `world`.
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

/// What decides which samples a step has: files, tokenizer, the tokens around texts, sizes. For
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

/// --verify: one sample of each data-parallel rank, forward and backward, is compared with one
/// rank's model. Returns what was compared. Throws tessera::Error unless this mesh computes what
/// one rank does. Collective.
std::string verify(LlamaRun& run);

/// The run of `options` in a comm::fake_world of its ranks, or in a world of this CPU. It reads the
/// model's configuration, and no other file; it writes none. Throws
/// tessera::Error for what llama_train refuses.
tessera::planning::Run planned_run(const TrainOptions& options,
                                   const tessera::comm::WorldPtr& world);

/// Makes or checks all that the run will write: better to learn before the training than after it
/// that its result can't be written. Collective; a failure on rank 0 is an error on all.
void prepare_outputs(const LlamaRun& run, tessera::training::Checkpointer& checkpoints,
                     tessera::training::MetricLog& log);

/// The mesh, the model, and the first step of the run.
void print_start(const LlamaRun& run, const tessera::training::Checkpointer& checkpoints,
                 std::optional<double> peak_flops);

/// --save-lora, --merge-lora and --save-hf. Collective.
void export_weights(LlamaRun& run);

/// run.json of --metrics.
void write_record(const LlamaRun& run);

/// Takes the folder of --output-dir for this run, and leaves its resolved flags there: config.toml,
/// or config-2.toml and so on where the run is resumed. `goes_on`: whether a step was loaded; a run
/// of --resume auto that ended before its first one begins again with the same flags. Throws
/// tessera::Error where the folder has another run, also one that begins at the same time, and
/// where it can't be written. For rank 0.
void take_run_folder(const TrainOptions& options, bool goes_on);

/// To be saved with each step. Reads a part of each data file.
nlohmann::json checkpoint_entries(const LlamaRun& run);

/// Fills the run's state. Throws tessera::Error where the checkpoint's data, model or flags of
/// fine-tuning are not those of the run, as its `entries` say. Collective.
void load_checkpoint(LlamaRun& run, tessera::training::Checkpointer& checkpoints,
                     const nlohmann::json& entries);

/// The adapters of --lora-rank, with the defaults of what is not given.
tessera::nn::LoraOptions lora_options(const TrainOptions& options);

/// The flags that decide, besides the model's config.json, what a step computes and what the
/// optimizer keeps: an object of their names and values, without those that are off. For
/// checkpoints.
nlohmann::json fine_tuning_record(const TrainOptions& options);

/// A run of llama_train: trains what the flags say, and writes what they ask for. `signals`: where
/// one comes, the run ends after its step or batch of evaluation, or before the first step, with a
/// checkpoint of what is not saved yet; nullptr: never. False if it ended so. Collective over
/// `world`; a failure on one rank throws there.
bool train(const TrainOptions& options, const tessera::comm::WorldPtr& world,
           const tessera::StopSignals* signals = nullptr);

}  // namespace llama
