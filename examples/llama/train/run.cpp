// The parts of a run: the meshes, the model, the optimizer, the training step and its FLOPs.

#include "examples/llama/train/run.h"

#include <ATen/Context.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "examples/llama/start.h"
#include "tessera/core/placement.h"
#include "tessera/observe/metrics.h"

namespace llama {

using namespace tessera;

void choose_kernels(const TrainOptions& o) {
  nn::allow_math_attention(o.allow_math_attention);
  if (o.deterministic) {
    // In deterministic mode, libtorch requires a cuBLAS workspace of fixed size.
    ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
    // Deterministic mode would by default fill all new memory, which costs time.
    at::globalContext().setDeterministicFillUninitializedMemory(false);
  }
}

nn::LoraOptions lora_options(const TrainOptions& o) {
  return {.rank = o.lora_rank,
          .alpha = o.lora_alpha.value_or(static_cast<double>(o.lora_rank)),
          .targets = o.lora_targets.empty() ? std::vector<std::string>{"model.layers.*.*.*_proj"}
                                            : o.lora_targets,
          .dropout = o.lora_dropout};
}

namespace {

/// Creates the mesh (dp, tp), with dp_replicate, ep and cp if these degrees are above 1. Throws
/// tessera::Error unless the product of the degrees equals the number of ranks.
DeviceMesh make_mesh(const TrainOptions& o, const comm::WorldPtr& world) {
  const std::int64_t ranks = o.ranks();
  TESSERA_CHECK(ranks == world->size(),
                product_text({{"--dp", o.dp},
                              {"--ep", o.ep},
                              {"--cp", o.cp},
                              {"--tp", o.tp},
                              {"--dp-replicate", o.dp_replicate}}),
                " needs ", ranks, ranks == 1 ? " rank, but " : " ranks, but ", world->size(),
                world->size() == 1 ? " is" : " are", " running; start ", ranks,
                " (tessera-run --nproc ", ranks, ") or change the degrees");
  std::vector<std::int64_t> sizes{o.dp, o.tp};
  std::vector<std::string> names{"dp", "tp"};
  if (o.cp > 1) {
    sizes.insert(sizes.begin() + 1, o.cp);
    names.insert(names.begin() + 1, "cp");
  }
  if (o.ep > 1) {
    sizes.insert(sizes.begin() + 1, o.ep);
    names.insert(names.begin() + 1, "ep");
  }
  if (o.dp_replicate > 1) {
    sizes.insert(sizes.begin(), o.dp_replicate);
    names.insert(names.begin(), "dp_replicate");
  }
  return init_device_mesh(world, std::move(sizes), std::move(names));
}

/// With context parallelism, replaces the inputs and targets of `batch` by this rank's shards along
/// the sequence. `batch` keeps the positions of the whole sequence.
data::BatchLoader::Batch tokens_of_rank(const Llama& model, data::BatchLoader::Batch batch) {
  if (const auto& split = model.context_parallel()) {
    batch.inputs = split->shard(batch.inputs, 1);
    batch.targets = split->shard(batch.targets, 1);
  }
  return batch;
}

/// With ZeRO-3, FSDP frees the gathered parameters after forward, and backward gathers the
/// parameters a second time. With ZeRO-2, the parameters remain gathered until backward.
ParallelOptions parallel_options(const TrainOptions& options) {
  const std::string& ac = options.ac;
  const bool full = ac.starts_with("full"), selective = ac.starts_with("selective");
  // The number of blocks with activation checkpointing (--ac selective:12); nullopt: all blocks.
  std::optional<std::int64_t> blocks;
  if (const std::size_t colon = ac.find(':'); colon != std::string::npos) {
    blocks = std::stoll(ac.substr(colon + 1));
  }
  return {.sequence_parallel = options.sp,
          .loss_parallel = options.loss_parallel,
          .regather = options.sp_regather,
          .reshard_last = options.reshard_last,
          .fsdp = {.mp_policy = {.param_dtype = scalar_type(options.param_dtype),
                                 .reduce_dtype = scalar_type(options.reduce_dtype)},
                   .offload_policy =
                       options.offload ? std::make_optional<fsdp::OffloadPolicy>() : std::nullopt,
                   .reshard_after_forward = options.zero == 3},
          .activations = full        ? ActivationMemory::kInputs
                         : selective ? ActivationMemory::kMatmuls
                                     : ActivationMemory::kAll,
          .recomputed_blocks = blocks};
}

/// Creates the model on the meta device, with adapters and frozen parameters as the flags say. Must
/// precede parallelize(), which shards each adapter like its base weight.
std::shared_ptr<Llama> make_meta_model(const TrainOptions& o, const Config& config) {
  std::shared_ptr<Llama> model;
  {
    // The model is created on the meta device, because one rank can lack memory for the whole
    // model.
    const nn::MetaDevice meta;
    model = std::make_shared<Llama>(config, o.seq, o.dropout);
  }
  if (o.fp8) {
    // Neither the output head nor the adapters, which are added later, are converted to fp8.
    const std::vector<std::string> converted =
        nn::convert_to_fp8(*model, {.exclude = {"lm_head"}, .multiple_of = 16 * o.tp});
    TESSERA_CHECK(!converted.empty(),
                  "--fp8 is given, but no linear layer has two sizes that are multiples of ",
                  16 * o.tp, o.tp > 1 ? " (16 x --tp)" : "", "; leave --fp8 out");
  }
  if (o.lora_rank > 0) {
    nn::apply_lora(*model, lora_options(o));
  }
  nn::freeze(*model, o.freeze);
  const auto is_trained = [](const auto& entry) { return entry.second->get().requires_grad(); };
  TESSERA_CHECK(o.steps == 0 || std::ranges::any_of(model->named_slots(), is_trained),
                "--freeze leaves no parameter to train; pass patterns that match fewer parameters");
  return model;
}

}  // namespace

Config model_config(const TrainOptions& o) {
  const std::filesystem::path file = o.model.empty()
                                         ? std::filesystem::path(o.config)
                                         : std::filesystem::path(o.model) / "config.json";
  Config config = read_config(file);
  if (o.layers > 0) {
    config.num_hidden_layers = std::min(config.num_hidden_layers, o.layers);
  }
  // Rejects an excessive --seq before memory is allocated. A model can be trained with sequences
  // longer than its max_position_embeddings, as in `transformers`.
  constexpr std::int64_t kMostTokens = 1'000'000, kMostOfAStep = std::int64_t{1} << 40;
  const std::int64_t most = std::max(config.max_positions, kMostTokens);
  TESSERA_CHECK(o.seq <= most, "--seq ", o.seq, " is more than the limit of ", most,
                " tokens; pass a smaller --seq");
  TESSERA_CHECK(o.batch <= kMostOfAStep / o.seq, "--batch ", o.batch, " x --seq ", o.seq,
                " is more than ", kMostOfAStep, " tokens per step; pass smaller values");
  TESSERA_CHECK(o.steps == 0 || config.attention_dropout == 0, file.string(),
                ": \"attention_dropout\" is ", config.attention_dropout,
                ", but attention dropout is not implemented in training; set the key to 0, or use "
                "--dropout, which applies to the results of attention and MLP");
  const char* for_experts = o.ep > 1                            ? "--ep"
                            : o.router_aux_loss.value_or(0) > 0 ? "--router-aux-loss"
                            : o.router_z_loss > 0               ? "--router-z-loss"
                            : o.expert_load > 1                 ? "--expert-load"
                                                                : nullptr;
  TESSERA_CHECK(config.num_experts > 0 || for_experts == nullptr, for_experts,
                " is given, but the model ", file.string(), " has no experts; leave the flag out");
  check_tensor_parallel(config, o.tp);
  return config;
}

void check_model(const TrainOptions& options) {
  const Config config = model_config(options);
  if (options.fp8 || options.lora_rank > 0 || !options.freeze.empty()) {
    make_meta_model(options, config);
  }
}

namespace {

/// The maximum size of the logits of one chunk of the loss. For example, the logits of 2048 tokens
/// with a vocabulary of 128,256 take 525 MB in bf16.
constexpr std::int64_t kChunkBytes = std::int64_t{640} << 20;

/// Whether the loss is computed in chunks. Small logits are not chunked, so that gradients are
/// rounded only once. The choice depends only on sizes, so that llama_plan makes the same choice.
bool takes_loss_in_chunks(const Llama& model, const TrainOptions& o, std::int64_t tokens,
                          const tensor_parallel::LinearCrossEntropyOptions& head) {
  if (o.loss_chunks) {
    return *o.loss_chunks > 1;
  }
  const std::int64_t columns = (model.config().vocab_size + o.tp - 1) / o.tp;
  const auto width = static_cast<std::int64_t>(elementSize(scalar_type(o.param_dtype)));
  return o.loss_parallel && tokens * columns * width > head.chunk_bytes;
}

/// Returns the loss of the sequences `rows`, computed in chunks of tokens if --loss-chunks or the
/// size of the logits requires chunks. Collective with tp > 1.
at::Tensor loss_of_rows(Llama& model, const TrainOptions& options,
                        const data::BatchLoader::Batch& rows,
                        const tensor_parallel::CrossEntropyOptions& loss) {
  const at::Tensor targets = rows.targets.flatten();
  // The document boundaries are computed before the model's forward. Otherwise the forward would
  // wait until the positions have been read from the device.
  const nn::DocumentsPtr documents =
      rows.host_positions.defined()
          ? std::make_shared<const nn::Documents>(rows.host_positions, c10::Device(options.device))
          : nullptr;
  const tensor_parallel::LinearCrossEntropyOptions head{
      .loss = loss, .chunks = options.loss_chunks.value_or(0), .chunk_bytes = kChunkBytes};
  if (takes_loss_in_chunks(model, options, targets.size(0), head)) {
    return model(rows.inputs, HeadLoss{targets, head, rows.positions, documents});
  }
  // The logits can be sharded over the vocabulary: cross_entropy() accepts such logits.
  const at::Tensor logits =
      rows.positions.defined()
          ? model(rows.inputs, static_cast<KvCache*>(nullptr), rows.positions, documents)
          : model(rows.inputs);
  return tensor_parallel::cross_entropy(logits, targets, loss);
}

/// Returns the optimizer's parameter groups: with --decay-matrices-only two groups, with and
/// without weight decay; otherwise one group.
template <class Options>
std::vector<optim::Group<Options>> decay_groups(const TrainOptions& o,
                                                const std::vector<nn::SlotPtr>& slots,
                                                Options options) {
  if (!o.decay_matrices_only) {
    return {{slots, options}};
  }
  std::vector<optim::Group<Options>> groups{{{}, options}, {{}, options}};
  groups[1].options.weight_decay = 0;
  for (const nn::SlotPtr& slot : slots) {
    groups[slot->persistent().dim() >= 2 ? 0 : 1].parameters.push_back(slot);
  }
  std::erase_if(groups, [](const auto& group) { return group.parameters.empty(); });
  return groups;
}

std::unique_ptr<optim::AdamW> adamw(const TrainOptions& o, const std::vector<nn::SlotPtr>& slots) {
  const optim::AdamWOptions options{.lr = o.lr,
                                    .beta1 = o.betas[0],
                                    .beta2 = o.betas[1],
                                    .eps = o.eps,
                                    .weight_decay = o.weight_decay,
                                    .moment_dtype = scalar_type(o.moment_dtype),
                                    .seed = o.seed};
  return std::make_unique<optim::AdamW>(decay_groups(o, slots, options));
}

/// Returns the optimizer that the flags choose, without the weight averaging of --ema.
std::unique_ptr<optim::Optimizer> base_optimizer(const TrainOptions& o, const Llama& model) {
  if (o.optimizer == "sgd") {
    const optim::SgdOptions options{
        .lr = o.lr, .momentum = o.momentum, .weight_decay = o.weight_decay};
    return std::make_unique<optim::Sgd>(decay_groups(o, optim::slots_of(model), options));
  }
  if (o.optimizer == "adamw") {
    return adamw(o, optim::slots_of(model));
  }
  const optim::MuonSplit split = optim::split_for_muon(
      model, model.config().tie_word_embeddings ? std::vector<std::string>{}
                                                : std::vector<std::string>{"lm_head.weight"});
  // Muon and the AdamW of all other parameters share one learning rate, tuned for AdamW.
  const optim::MuonOptions options{.lr = o.lr,
                                   .weight_decay = o.weight_decay,
                                   .momentum = o.momentum,
                                   .rate = optim::MuonRate::kMatchRmsAdamW};
  return std::make_unique<optim::OptimizerList>(std::vector<std::shared_ptr<optim::Optimizer>>{
      std::make_shared<optim::Muon>(split.matrices, options), adamw(o, split.rest)});
}

std::unique_ptr<optim::Optimizer> make_optimizer(const TrainOptions& o, const Llama& model) {
  std::unique_ptr<optim::Optimizer> base = base_optimizer(o, model);
  return o.ema ? std::make_unique<optim::Ema>(std::move(base), *o.ema) : std::move(base);
}

}  // namespace

std::optional<double> peak_flops_of(const TrainOptions& o, comm::World& world) {
  const c10::ScalarType type = scalar_type(o.param_dtype);
  if (o.peak_flops.empty()) {
    return observe::peak_flops(observe::device_name(o.device), type);
  }
  return o.peak_flops == "measure" ? observe::measure_peak_flops(world, type)
                                   : std::stod(o.peak_flops);
}

namespace {

/// FLOPs of a matrix product per weight and token. In backward, the gradient of the input takes as
/// many FLOPs again, and so does the gradient of the weight.
constexpr double kProduct = 2;

/// Returns the index of the forward stage that uses a parameter: 0 for the embedding, 1 to N for
/// the N layers, N + 1 for the rest.
std::int64_t stage_of(const std::string& name, const Config& config) {
  const std::string layers = "model.layers.";
  if (name.starts_with(layers)) {
    return 1 + std::stoll(name.substr(layers.size()));
  }
  return name.starts_with("model.embed_tokens") ? 0 : 1 + config.num_hidden_layers;
}

bool is_trained(const nn::ParameterSlot& slot) {
  return slot.get().requires_grad();
}

/// Returns the first stage (stage_of) with a trained parameter. Backward ends at this stage.
std::int64_t first_trained(const Llama& model) {
  std::int64_t first = 1 + model.config().num_hidden_layers;
  for (const auto& [name, slot] : model.named_slots()) {
    if (is_trained(*slot)) {
      first = std::min(first, stage_of(name, model.config()));
    }
  }
  return first;
}

/// Whether the matrix products of a stage compute the gradient of their input. True for all
/// products of the first trained layer, even those before the first trained weight.
bool has_input_gradient(std::int64_t stage, std::int64_t first, const Config& config) {
  return stage > first || (stage == first && stage <= config.num_hidden_layers);
}

/// Returns the FLOPs per token of all matrix products with weights. An embedding is a lookup
/// without a matrix product, unless the embedding is also the head.
double products_of(const Llama& model, std::int64_t first) {
  const Config& config = model.config();
  double flops = 0;
  for (const auto& [name, slot] : model.named_slots()) {
    const std::int64_t stage = stage_of(name, config);
    if (stage == 0 && !config.tie_word_embeddings) {
      continue;
    }
    const std::int64_t product = stage > 0 ? stage : 1 + config.num_hidden_layers;
    const int of_gradients =
        int{has_input_gradient(product, first, config)} + int{is_trained(*slot)};
    // A token uses only some of the experts. The weights of all experts are one stacked tensor.
    const bool of_experts = slot->role.stored_parts && slot->role.stored_parts->stacked;
    const double share = of_experts ? static_cast<double>(config.num_experts_per_tok) /
                                          static_cast<double>(config.num_experts)
                                    : 1;
    flops += kProduct * (1 + of_gradients) * share * static_cast<double>(slot->get().numel());
  }
  return flops;
}

/// Returns attention's FLOPs per token: two matrix products per layer in forward, four in backward.
double attention_of(const Config& config, std::int64_t sequence, std::int64_t first) {
  const std::int64_t layers = config.num_hidden_layers;
  const auto with_gradient = static_cast<double>(layers - std::max<std::int64_t>(first - 1, 0));
  const auto scores = static_cast<double>(config.num_attention_heads * config.head_dim * sequence);
  return 2 * kProduct * scores * (static_cast<double>(layers) + 2 * with_gradient);
}

}  // namespace

observe::ModelFlops flops_of(const TrainOptions& o, const Config& config) {
  const std::shared_ptr<Llama> model = make_meta_model(o, config);
  const std::int64_t first = first_trained(*model);
  const double products = products_of(*model, first);
  const double attention = attention_of(config, o.seq, first);
  return {products + attention, products + attention / 2};
}

namespace {

/// Creates the parallelized model and sets its weights. Called by the constructor of LlamaRun after
/// options, world, mesh and config are set.
std::shared_ptr<Llama> make_model(const LlamaRun& run, bool loads) {
  const TrainOptions& o = run.options;
  std::shared_ptr<Llama> model = make_meta_model(o, run.config);
  // Without a GPU (for example when planning a run) the compute capability is 0.
  const int capability = o.fp8 && o.device == "cuda" ? observe::compute_capability() : 0;
  TESSERA_CHECK(capability == 0 || capability >= 89, "--fp8 is given, but this GPU has compute ",
                "capability ", capability / 10, ".", capability % 10,
                ", but FP8 matrix products need 8.9 or more; leave --fp8 out");
  parallelize(*model, run.mesh, parallel_options(o));
  // Allocates memory only for this rank's shards.
  nn::to_empty(*model, o.offload ? c10::Device(c10::kCPU) : c10::Device(o.device));
  // The weights are set even if a checkpoint replaces the weights later, because an optimizer
  // requires initialized parameters.
  if (o.model.empty() || loads) {
    nn::init_weights(*model, o.seed);
  } else {
    nn::init_buffers(*model);
    checkpoint::load_hugging_face(*model, *run.world, o.model);
    // Initializes the LoRA adapters, which the model's folder does not contain.
    nn::init_unfilled(*model, o.seed);
  }
  nn::check_initialized(*model);
  // Buffers (the rotary tables) are on the compute device, even with --offload.
  for (const auto& [name, slot] : model->named_buffer_slots()) {
    slot->swap(slot->get().to(c10::Device(o.device)));
  }
  return model;
}

training::StepOptions step_options(const TrainOptions& o, const TrainingData& data) {
  return {.batch = o.batch,
          .accumulate = o.accumulate,
          .mean_of_micro_batches = !(data.loader && data.loader->ignores_targets()),
          .sync_each_micro_batch = o.zero != 2,
          .max_norm = o.clip,
          .schedule = optim::LrSchedule({.schedule = optim::parse_schedule(o.schedule),
                                         .warmup = o.warmup,
                                         .steps = o.steps,
                                         .decay_ratio = o.decay_ratio,
                                         .min_factor = o.lr > 0 ? o.min_lr / o.lr : 0}),
          .advice_not_finite = "lower --lr or --clip, or look at the data of this step",
          .advice_out_of_memory = "pass a smaller --batch or --ac full, or start more ranks"};
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
      model(make_model(*this, loads)),
      optimizer(make_optimizer(options, *model)),
      state{*model, *optimizer, optim::GradScaler({.enabled = options.param_dtype == "fp16"})},
      step_options_(step_options(options, data)),
      meter_(world, options.device) {
  if (data.loader) {
    prefetch_.emplace(data.loader, rows, uses_cuda(), /*background=*/!options.planned);
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

/// A step's loss is the sum of the micro-batches' losses or, with
/// StepOptions::mean_of_micro_batches, the mean. The auxiliary losses are always a mean.
at::Tensor LlamaRun::with_router_losses(const at::Tensor& loss) {
  const nn::RouterLosses router = nn::take_router_losses(*model, data_ranks);
  const auto parts = static_cast<double>(options.accumulate);
  const double scale = step_options_.mean_of_micro_batches ? 1 : 1 / parts;
  const at::Tensor both = at::stack({router.load_balancing, router.z}).detach().div(parts);
  router_losses_ = router_losses_.defined() ? router_losses_ + both : both;
  largest_expert_load_ = std::max(largest_expert_load_, std::ranges::max(router.largest_over_mean));
  const double balance = options.router_aux_loss.value_or(config.router_aux_loss_coef);
  at::Tensor sum = loss;
  if (balance > 0) {
    sum = sum + balance * scale * router.load_balancing.to(loss.scalar_type());
  }
  return options.router_z_loss > 0
             ? sum + options.router_z_loss * scale * router.z.to(loss.scalar_type())
             : sum;
}

observe::StepMetrics LlamaRun::step() {
  meter_.begin();
  // All micro-batches are copied to the device first, so that the CPU queues the whole step without
  // waiting.
  const data::BatchLoader::Batch batch = own_rows(prefetch_->load(state.samples / options.batch));
  meter_.data_ready();
  tensor_parallel::CrossEntropyOptions loss = loss_options();
  if (!step_options_.mean_of_micro_batches) {
    loss.tokens = tensor_parallel::tokens_per_rank(batch.targets, data_ranks);
  }
  router_losses_.reset();
  largest_expert_load_ = 0;
  const training::StepResult result =
      training::step(state, data_ranks, step_options_, [&](std::int64_t i) {
        const at::Tensor own = loss_of(batch, i, loss);
        return config.num_experts > 0 ? with_router_losses(own) : own;
      });
  std::optional<observe::ExpertMetrics> experts;
  if (router_losses_.defined()) {
    if (data_ranks.size() > 1) {
      data_ranks.group_of_all_ranks().all_reduce(router_losses_, ReduceOp::kAvg)->wait();
    }
    const at::Tensor means = router_losses_.to(c10::kCPU);
    experts = {means[0].item<double>(), means[1].item<double>(), largest_expert_load_};
  }
  observe::StepMetrics metrics = meter_.end(state, result, options.lr * result.lr_factor);
  metrics.experts = experts;
  return metrics;
}

/// The model on the mesh and the reference on one rank both compute the training loss: the mean of
/// all ranks' losses must equal the loss of the reference.
std::string verify(LlamaRun& run) {
  const data::BatchLoader::Batch whole =
      run.data.loader
          ->load(run.state.samples / run.options.batch,
                 {{run.rows.front().first, run.rows.front().first + 1}})
          .to(c10::Device(run.options.device));
  const data::BatchLoader::Batch own = tokens_of_rank(*run.model, whole);
  tensor_parallel::CrossEntropyOptions of_whole = run.loss_options(), of_own = of_whole;
  if (run.data.loader->ignores_targets()) {
    of_whole.tokens = tensor_parallel::tokens_per_rank(whole.targets, run.batch_ranks);
    of_own.tokens = tensor_parallel::tokens_per_rank(own.targets, run.data_ranks);
  }
  // The reference model is on the meta device. Its parameters have the dtype in which the
  // parallelized model computes.
  const std::shared_ptr<Llama> reference = make_meta_model(run.options, run.config);
  for (const auto& [name, slot] : reference->named_slots()) {
    slot->swap(slot->get().detach().to(scalar_type(run.options.param_dtype)));
  }
  observe::VerifyOptions options{.batch_dims = batch_mesh(run.mesh).shape().names(),
                                 .splits_samples = run.options.cp > 1};
  if (run.options.cp > 1) {
    options.batch_dims.emplace_back("cp");
  }
  if (run.options.reduce_dtype == "bf16") {
    options.coarsest = c10::kBFloat16;
  }
  const observe::VerifyReport report = observe::verify(
      *run.model, *reference, run.mesh,
      [&](Llama& model) {
        const bool on_mesh = &model == run.model.get();
        return loss_of_rows(model, run.options, on_mesh ? own : whole, on_mesh ? of_own : of_whole);
      },
      options);
  report.check();
  return report.text();
}

planning::Run planned_run(const TrainOptions& options, const comm::WorldPtr& world) {
  // The device of a comm::fake_world is a CPU, even if the planned run uses a GPU.
  TrainOptions on_cpu = options;
  on_cpu.device = "cpu";
  on_cpu.backend = "gloo";
  const auto run = std::make_shared<LlamaRun>(std::move(on_cpu), world, /*loads=*/false);
  nn::visit_modules(*run->model, [&](const std::string&, nn::ModuleBase& module) {
    if (auto* mixture = dynamic_cast<nn::MixtureOfExperts*>(&module)) {
      mixture->set_planned_load(options.expert_load);
    }
  });
  return {.model = run->model, .mesh = run->mesh, .step = [run] {
            const StrictScope strict;
            run->step();
          }};
}

std::function<std::vector<std::int64_t>(const std::vector<std::int64_t>& coordinate)> planned_sizes(
    const TrainOptions& o) {
  const Config config = read_config(o.config);
  return [o, window = config.sliding_window,
          experts = config.num_experts](const std::vector<std::int64_t>& coordinate) {
    const std::int64_t tokens =
        o.batch / (o.dp * o.dp_replicate * o.ep * o.accumulate) * (o.seq / o.cp);
    std::vector<std::int64_t> sizes{chunk_size(tokens, o.tp, coordinate.back())};
    // The experts are split over the mesh dimension ep or, if ep is 1, over tp.
    if (experts > 0) {
      const std::size_t after = o.cp > 1 ? 3 : 2;
      const std::int64_t rank =
          o.ep > 1 ? coordinate[coordinate.size() - after] : coordinate.back();
      sizes.push_back(chunk_size(experts, o.ep > 1 ? o.ep : o.tp, rank));
      // The expert with the most rows (tokens) is assumed to be on the first rank.
      sizes.push_back(o.expert_load > 1 && rank == 0 ? 1 : 0);
    }
    if (o.cp > 1) {
      // The mesh dimension "cp" comes just before "tp", the last dimension. Each attention layer
      // calls 3 kernels on the first "cp" rank, 2 on the last, and 4 on others. With a sliding
      // window, each rank can differ.
      const std::int64_t rank = coordinate[coordinate.size() - 2];
      const bool differs = window > 0 || rank == 0;
      sizes.push_back(differs ? rank : rank == o.cp - 1 ? 2 : 1);
    }
    return sizes;
  };
}

}  // namespace llama
