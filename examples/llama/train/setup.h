// From the flags of a run to its mesh and its model.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "examples/llama/models.h"
#include "examples/llama/train/options/train_options.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/data/batch_loader.h"
#include "tessera/tensor_parallel/loss_parallel.h"

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

/// What --optimizer and the flags beside it say.
std::unique_ptr<tessera::optim::Optimizer> make_optimizer(const TrainOptions& options,
                                                          const Llama& model);
/// FLOPs a token of a training step. Where --freeze or --lora-rank leaves weights untrained,
/// without those of gradients that no step needs: of the weights themselves, and of all that lies
/// before the first trained one.
tessera::observe::ModelFlops flops_of(const TrainOptions& options, const Config& config);
/// FLOP/s of a rank's device, as --peak-flops says or by its data sheet; nullopt where that is not
/// known. Measuring is collective over `world`.
std::optional<double> peak_flops_of(const TrainOptions& options, tessera::comm::World& world);
/// What --schedule and the flags beside it say.
tessera::optim::LrSchedule make_schedule(const TrainOptions& options);

/// What --save-hf copies beside the weights: the files of --model, with those of --tokenizer
/// instead of its own. nullopt if neither is given: files that the folder has stay.
std::optional<tessera::checkpoint::FilesBesideWeights> files_beside_weights(
    const TrainOptions& options);

}  // namespace llama
