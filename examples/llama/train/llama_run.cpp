#include "examples/llama/train/llama_run.h"

#include <utility>

#include "examples/llama/train/setup.h"

namespace llama {

using namespace tessera;

namespace {

/// Also where a checkpoint replaces the weights: the optimizer's state is made for filled ones.
void fill_model(Llama& model, const TrainOptions& options, comm::World& world, bool loads) {
  if (options.model.empty() || loads) {
    nn::init_weights(model, options.seed);
  } else {
    nn::init_buffers(model);
    checkpoint::load_hugging_face(model, world, options.model);
    // Adapters, which are not in the folder.
    nn::init_unfilled(model, options.seed);
  }
  nn::check_initialized(model);
}

/// For the constructor, after options, world, mesh and config.
std::shared_ptr<Llama> make_filled_model(const LlamaRun& run, bool loads) {
  std::shared_ptr<Llama> model = make_model(run.options, run.config, run.mesh);
  fill_model(*model, run.options, *run.world, loads);
  // Offloaded or not, the rotary tables are where the model computes.
  for (const auto& [name, slot] : model->named_buffer_slots()) {
    slot->swap(slot->get().to(c10::Device(run.options.device)));
  }
  // Does nothing without TESSERA_COMPARE.
  observe::compare_runs(*model, run.mesh, batch_mesh(run.mesh).shape().names());
  return model;
}

training::StepOptions step_options(const TrainOptions& o, const TrainingData& data) {
  return {.batch = o.batch,
          .accumulate = o.accumulate,
          .mean_of_micro_batches = !(data.loader && data.loader->ignores_targets()),
          .sync_each_micro_batch = o.zero != 2,
          .max_norm = o.clip,
          .schedule = make_schedule(o),
          .advice_not_finite = "lower --lr or --clip, or look at the data of this step",
          .advice_out_of_memory = "take a smaller --batch, --ac full or more ranks"};
}

}  // namespace

LlamaRun::LlamaRun(TrainOptions run_options, comm::WorldPtr run_world, bool loads)
    : options(std::move(run_options)),
      world(std::move(run_world)),
      mesh(make_mesh(options, world)),
      batch_ranks(batch_mesh(mesh).flatten()),
      data_ranks(data_mesh(mesh).flatten()),
      config(model_config(options)),
      data(open_training_data(options, config)),
      rows(data::rows_of_rank(options.batch, options.accumulate, batch_ranks.local_rank(),
                              batch_ranks.size())),
      model(make_filled_model(*this, loads)),
      optimizer(make_optimizer(options, *model)),
      state{*model, *optimizer, optim::GradScaler({.enabled = options.param_dtype == "fp16"})},
      step_options_(step_options(options, data)),
      meter_(world, options.device) {
  if (data.loader) {
    prefetch_.emplace(data.loader, rows, uses_cuda(), /*beside=*/!options.planned);
  }
  if (!options.planned) {
    check_same_data(options, data, *world);
  }
  manual_seed(options.seed);
}

at::Tensor LlamaRun::loss_of(const data::BatchLoader::Batch& batch, std::int64_t i,
                             const tensor_parallel::CrossEntropyOptions& loss) {
  const std::int64_t count = rows.front().last - rows.front().first;
  return loss_of_rows(*model, options, batch.rows(i * count, count), loss);
}

tensor_parallel::CrossEntropyOptions LlamaRun::loss_options() const {
  return {.label_smoothing = options.label_smoothing, .z_loss = options.z_loss};
}

data::BatchLoader::Batch LlamaRun::own_rows(data::BatchLoader::Batch batch) const {
  return tokens_of_rank(*model, batch.to(c10::Device(options.device)));
}

observe::StepMetrics LlamaRun::step() {
  meter_.begin();
  // All micro-batches are copied to the device here: the host then queues the step without a wait.
  const data::BatchLoader::Batch batch = own_rows(prefetch_->load(state.samples / options.batch));
  meter_.data_ready();
  tensor_parallel::CrossEntropyOptions loss = loss_options();
  if (!step_options_.mean_of_micro_batches) {
    loss.tokens = tensor_parallel::tokens_per_rank(batch.targets, data_ranks);
  }
  const training::StepResult result = training::step(
      state, data_ranks, step_options_, [&](std::int64_t i) { return loss_of(batch, i, loss); });
  return meter_.end(state, result, options.lr * result.lr_factor);
}

}  // namespace llama
