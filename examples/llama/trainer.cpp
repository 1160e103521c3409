#include "examples/llama/trainer.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <iostream>

#include "examples/llama/parallelize.h"

namespace llama {

using namespace tessera;
using Clock = std::chrono::steady_clock;

/// Enough text for a steady figure, little enough to end a short run soon.
constexpr std::int64_t kMaxEvalBatches = 32;

namespace {

c10::ScalarType scalar_type(const std::string& name) {
  if (name == "bf16") return c10::kBFloat16;
  return name == "fp16" ? c10::kHalf : c10::kFloat;
}

/// Throws Error unless `folder` can be written, or made where it would stand. Makes nothing.
void check_writable_folder(const std::filesystem::path& folder) {
  std::filesystem::path existing = std::filesystem::absolute(folder);
  while (!std::filesystem::exists(existing)) existing = existing.parent_path();
  TESSERA_CHECK(std::filesystem::is_directory(existing) && access(existing.c_str(), W_OK) == 0,
                "--save-hf ", folder.string(), " can't be written: ", existing.string(),
                std::filesystem::is_directory(existing) ? " is not writable" : " is not a folder",
                "; name another");
}

fsdp::Options fsdp_options(const TrainOptions& o) {
  return {.mp_policy = {.param_dtype = scalar_type(o.param_dtype),
                        .reduce_dtype = scalar_type(o.reduce_dtype)},
          .offload_policy = o.offload ? std::make_optional<fsdp::OffloadPolicy>() : std::nullopt,
          .reshard_after_forward = o.zero == 3};
}

ActivationMemory activation_memory(const std::string& ac) {
  if (ac == "full") return ActivationMemory::kInputs;
  return ac == "selective" ? ActivationMemory::kMatmuls : ActivationMemory::kAll;
}

/// The mesh of the run: without a dimension for replicas where there is one.
DeviceMesh make_mesh(const TrainOptions& o, const comm::WorldPtr& world) {
  const std::int64_t ranks = o.dp_replicate * o.dp * o.tp;
  TESSERA_CHECK(ranks == world->size(),
                product_text({{"--dp", o.dp}, {"--tp", o.tp}, {"--dp-replicate", o.dp_replicate}}),
                ranks == 1 ? " is 1 rank, but " : " is " + std::to_string(ranks) + " ranks, but ",
                world->size(), world->size() == 1 ? " is" : " are", " running; start ", ranks,
                " (tessera-run --nproc ", ranks, ") or change the degrees");
  if (o.dp_replicate == 1) return init_device_mesh(world, {o.dp, o.tp}, {"dp", "tp"});
  return init_device_mesh(world, {o.dp_replicate, o.dp, o.tp}, {"dp_replicate", "dp", "tp"});
}

}  // namespace

Trainer::Trainer(TrainOptions options, comm::WorldPtr world)
    : options_(std::move(options)), world_(std::move(world)) {
  mesh_ = make_mesh(options_, world_);
  data_mesh_ = data_mesh(mesh_).flatten();
  config_ =
      read_config(options_.model.empty() ? std::filesystem::path(options_.config)
                                         : std::filesystem::path(options_.model) / "config.json");
  open_data();
  build_model();
  if (is_main()) prepare_outputs();
}

void Trainer::prepare_outputs() {
  // Better to learn before the training than after it that its result can't be written.
  if (!options_.save_hf.empty()) check_writable_folder(options_.save_hf);
  if (!options_.metrics.empty()) {
    writer_ = std::make_unique<observe::MetricsWriter>(options_.metrics);
  }
}

void Trainer::open_data() {
  tokenizer_ = options_.tokenizer.empty() ? data::byte_tokenizer()
                                          : data::sentencepiece_tokenizer(options_.tokenizer);
  if (!options_.eval_text.empty()) {
    eval_text_ = data::read_text(options_.eval_text);
    eval_loader_ =
        std::make_unique<data::BatchLoader>(data::make_token_source(tokenizer_->encode(eval_text_)),
                                            options_.batch, options_.seq, config_.vocab_size);
  }
  if (options_.steps == 0) return;
  const data::TokenSourcePtr source =
      options_.tokens.empty()
          ? data::make_token_source(tokenizer_->encode(data::read_text(options_.text)))
          : data::open_token_shards(options_.tokens);
  loader_ =
      std::make_unique<data::BatchLoader>(source, options_.batch, options_.seq, config_.vocab_size);
}

void Trainer::build_model() {
  {
    const nn::MetaDevice meta;
    model_ = std::make_shared<Llama>(config_, options_.seq);
  }
  const ParallelOptions parallel{.sequence_parallel = options_.sp,
                                 .loss_parallel = options_.loss_parallel,
                                 .fsdp = fsdp_options(options_),
                                 .activations = activation_memory(options_.ac)};
  parallelize(*model_, mesh_, parallel);
  const c10::Device device(options_.device);
  nn::to_empty(*model_, options_.offload ? c10::Device(c10::kCPU) : device);
  if (options_.model.empty()) {
    nn::init_weights(*model_, options_.seed);
  } else {
    nn::init_buffers(*model_);
    checkpoint::load_hugging_face(*model_, options_.model);
  }
  nn::check_initialized(*model_);
  // Offloaded or not, the rotary tables are where the model computes.
  for (const auto& [name, slot] : model_->named_buffer_slots()) slot->set(slot->get().to(device));
  for (const auto& [name, slot] : model_->named_slots()) parameters_.push_back(slot);
  optimizer_ = std::make_unique<optim::AdamW>(
      parameters_, optim::AdamWOptions{.lr = options_.lr, .weight_decay = options_.weight_decay});
  scaler_ = optim::GradScaler({.enabled = options_.param_dtype == "fp16"});
  schedule_.emplace(optim::parse_schedule(options_.schedule), options_.warmup, options_.steps);
}

at::Tensor Trainer::loss_of(const data::BatchLoader& loader, std::int64_t step,
                            std::int64_t micro_batch) {
  const std::int64_t rows = options_.batch / (data_mesh_.size() * options_.accumulate);
  const std::int64_t first = (data_mesh_.local_rank() * options_.accumulate + micro_batch) * rows;
  const data::BatchLoader::Batch batch = loader.load(step, first, first + rows);
  const c10::Device device(options_.device);
  const at::Tensor logits = (*model_)(batch.inputs.to(device));
  return tensor_parallel::cross_entropy(logits, batch.targets.to(device).flatten());
}

at::Tensor Trainer::mean_over_data(const at::Tensor& value) const {
  at::Tensor mean = value.to(c10::kFloat).clone();
  if (data_mesh_.size() > 1) data_mesh_.group().all_reduce(mean, ReduceOp::kAvg)->wait();
  return mean;
}

at::Tensor Trainer::accumulate_gradients(std::int64_t step) {
  const std::int64_t count = options_.accumulate;
  at::Tensor mean = at::zeros({}, at::device(c10::Device(options_.device)));
  for (std::int64_t i = 0; i < count; ++i) {
    if (options_.zero == 2) {
      // Parameters are whole all the time, so gradients may be: one gather and one reduction a
      // step. ZeRO-3 reduces each micro-batch's, so that no rank holds anything whole.
      fsdp::set_reshard_after_backward(*model_, i + 1 == count);
      fsdp::set_requires_gradient_sync(*model_, i + 1 == count);
    }
    const at::Tensor loss = loss_of(*loader_, step, i) / count;
    scaler_.scale(loss).backward();
    mean += loss.detach();
  }
  return mean;
}

observe::StepMetrics Trainer::step(std::int64_t index) {
  const Clock::time_point start = Clock::now();
  const comm::TrafficTable before = world_->traffic().table();
  optimizer_->scale_lr(schedule_->factor(index));

  const at::Tensor loss = accumulate_gradients(index);
  const at::Tensor norm = scaler_.clip_grad_norm_(parameters_, options_.clip);
  const double scale = scaler_.scale();
  const bool stepped = scaler_.step(*optimizer_);
  // Without loss scaling the step's only synchronisation with the device.
  const at::Tensor figures =
      at::stack({mean_over_data(loss).to(norm.device()), norm}).to(c10::kCPU);

  observe::StepMetrics metrics;
  metrics.step = index + 1;
  metrics.loss = figures[0].item<double>();
  metrics.grad_norm = figures[1].item<double>();
  metrics.lr = options_.lr * schedule_->factor(index);
  if (scaler_.enabled()) metrics.loss_scale = scale;
  metrics.skipped = !stepped;
  check_finite(metrics);
  optimizer_->zero_grad();
  metrics.step_time_s = std::chrono::duration<double>(Clock::now() - start).count();
  observe::set_memory(metrics, options_.device);
  metrics.comm = world_->traffic().since(before);
  return metrics;
}

void Trainer::check_finite(const observe::StepMetrics& metrics) const {
  const bool gradients_served = std::isfinite(metrics.grad_norm) || metrics.skipped;
  if (std::isfinite(metrics.loss) && gradients_served) return;
  // Every rank knows that it happened; the first parameter that any rank finds is named.
  const auto named = model_->named_slots();
  auto first = static_cast<std::int64_t>(named.size());
  for (std::int64_t i = first - 1; i >= 0; --i) {
    const at::Tensor& grad = named[static_cast<std::size_t>(i)].second->persistent().grad();
    if (grad.defined() && !local_tensor(grad).isfinite().all().item<bool>()) first = i;
  }
  at::Tensor agreed = at::scalar_tensor(first, at::dtype(c10::kLong).device(options_.device));
  if (mesh_.size() > 1) mesh_.flatten().group().all_reduce(agreed, ReduceOp::kMin)->wait();
  const auto index = agreed.item<std::int64_t>();
  const bool found = index < static_cast<std::int64_t>(named.size());
  fail(
      "step ", metrics.step, ": the loss is ", metrics.loss, " and the gradient norm ",
      metrics.grad_norm,
      found ? "; the first parameter with a non-finite gradient is " : "; all gradients are finite",
      found ? named[static_cast<std::size_t>(index)].first : "",
      "; lower --lr or --clip, or look at the data of this step");
}

void Trainer::log(const observe::StepMetrics& metrics) {
  // The report shows the last step's traffic. Small blocks kept from every step would lie between
  // the step's large ones, and the heap would grow with the number of steps.
  if (!history_.empty()) history_.back().comm.clear();
  history_.push_back(metrics);
  if (writer_) writer_->write(metrics);
  const bool last = metrics.step == options_.steps;
  if (metrics.step == 1 || metrics.step % options_.log_every == 0 || last) {
    progress_->line(observe::titan_line(metrics, world_->size()));
  }
  if (metrics.skipped) {
    progress_->line(
        fmt::format("step: {:2}  left out: a gradient overflowed; the loss scale was {}",
                    metrics.step, *metrics.loss_scale));
  }
  progress_->update(metrics.step, metrics.loss, metrics.tokens_per_s);
}

void Trainer::run() {
  const StrictScope strict;
  const ParameterCount count = count_parameters(config_);
  const observe::ModelFlops flops = observe::model_flops(
      count.total, config_.tie_word_embeddings ? 0 : count.embedding, config_.num_hidden_layers,
      config_.num_attention_heads * config_.head_dim, options_.seq);
  const std::optional<double> peak = observe::peak_flops(observe::device_name(options_.device));
  if (is_main()) {
    progress_ = std::make_unique<observe::Progress>(options_.steps, stdout);
    history_.reserve(static_cast<std::size_t>(options_.steps));
    std::cout << to_string(mesh_) << "  parameters: " << count.total
              << "  device: " << options_.device << " (" << options_.param_dtype << ")"
              << std::endl;
  }
  for (std::int64_t i = 0; i < options_.steps; ++i) {
    observe::StepMetrics metrics = step(i);
    observe::set_throughput(metrics, options_.batch * options_.seq, world_->size(), flops, peak);
    if (is_main()) log(metrics);
  }
  if (eval_loader_ != nullptr) evaluate();
  write_outputs();
}

void Trainer::evaluate() {
  const std::int64_t batches = std::min(eval_loader_->samples() / options_.batch, kMaxEvalBatches);
  const c10::NoGradGuard no_grad;
  double sum = 0;
  for (std::int64_t i = 0; i < batches; ++i) {
    at::Tensor loss = loss_of(*eval_loader_, i, 0);
    for (std::int64_t k = 1; k < options_.accumulate; ++k)
      loss = loss + loss_of(*eval_loader_, i, k);
    sum += mean_over_data(loss / options_.accumulate).item<double>();
  }
  if (!is_main()) return;
  // Per byte, so that the two figures compare whatever the tokenizer.
  const double tokens_per_byte = static_cast<double>(tokenizer_->encode(eval_text_).size()) /
                                 static_cast<double>(eval_text_.size());
  const double loss = sum / static_cast<double>(batches);
  std::cout << fmt::format(
                   "held-out loss: {:.4f} nats/byte ({:.4f} a token, {} tokens of {}); "
                   "byte-bigram entropy of that text: {:.4f} nats/byte",
                   loss * tokens_per_byte, loss, batches * options_.batch * options_.seq,
                   options_.eval_text, data::bigram_entropy(eval_text_))
            << std::endl;
}

void Trainer::write_outputs() {
  if (!options_.save_hf.empty()) {
    checkpoint::save_hugging_face(*model_, *world_, options_.save_hf, config_.json);
  }
  if (!is_main() || options_.metrics.empty()) return;
  const std::filesystem::path report =
      std::filesystem::path(options_.metrics).parent_path() / "report.html";
  observe::write_report({.title = "llama_train on " + to_string(mesh_),
                         .configuration = options_.listing,
                         .sharding = observe::sharding_table(*model_),
                         .steps = history_,
                         .sample = ""},
                        report);
  std::cout << "report: " << report.string() << std::endl;
}

}  // namespace llama
