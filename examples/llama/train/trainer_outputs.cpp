// What a run prints and writes: its first lines, a line a step, the exports and the
// report.

#include <fmt/format.h>

#include <filesystem>
#include <iostream>
#include <string>

#include "examples/llama/models.h"
#include "examples/llama/scalar_type.h"
#include "examples/llama/train/options/outputs.h"
#include "examples/llama/train/run_folder.h"
#include "examples/llama/train/setup.h"
#include "examples/llama/train/trainer.h"
#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"

namespace llama {

using namespace tessera;

/// Rank 0's work. Agreed on: the others would otherwise set out and miss it.
void Trainer::prepare_outputs() {
  if (options_.planned) {
    return;
  }
  const auto failure =
      comm::first_failure(*hosts_at_start(*world_), c10::Device(c10::kCPU), [this] {
        if (is_main()) {
          open_outputs();
        }
      });
  if (failure) {
    fail(failure->message);
  }
}

void Trainer::open_outputs() {
  // Better to learn before the training than after it that its result can't be written.
  if (!options_.save_hf.empty()) {
    checkpoint::check_save_hugging_face(*model_, options_.save_hf, config_.json,
                                        scalar_type(options_.save_hf_dtype));
    if (const auto beside = files_beside_weights(options_)) {
      checkpoint::check_beside_weights(*beside, options_.save_hf);
    }
  }
  if (!options_.save_lora.empty()) {
    checkpoint::check_save_lora(*model_, options_.save_lora, base_model());
  }
  if (checkpoints_) {
    checkpoints_->make_folder();
  }
  if (!options_.output_dir.empty()) {
    take_run_folder(options_);
  }
  if (!options_.metrics.empty()) {
    // The report is of the whole run.
    history_ = observe::read_metrics(options_.metrics, position_.step);
    writer_ = std::make_unique<observe::MetricsWriter>(options_.metrics, position_.step);
  }
  if (!options_.tensorboard.empty()) {
    tensorboard_ =
        std::make_unique<observe::TensorBoardWriter>(options_.tensorboard, position_.step + 1);
  }
}

void Trainer::log(const observe::StepMetrics& metrics) {
  // The report shows the last step's traffic. Small blocks kept from every step would lie between
  // the step's large ones, and the heap would grow with the number of steps.
  if (!history_.empty()) {
    history_.back().comm.clear();
  }
  history_.push_back(metrics);
  if (writer_) {
    writer_->write(metrics);
  }
  if (tensorboard_) {
    log_to_tensorboard(metrics);
  }
  const bool last = metrics.step == options_.steps;
  if (metrics.step == 1 || metrics.step % options_.log_every == 0 || last) {
    progress_->line(observe::titan_line(metrics, world_->size()));
  }
  if (metrics.eval_loss) {
    progress_->line(
        fmt::format("validate step: {:2}  loss: {:7.4f}", metrics.step, *metrics.eval_loss));
  }
  if (metrics.skipped) {
    progress_->line(
        fmt::format("step: {:2}  left out: a gradient overflowed; the loss scale was {}",
                    metrics.step, *metrics.loss_scale));
  }
  progress_->update(metrics.step, metrics.loss, metrics.tokens_per_s);
  world_->set_step(metrics.step);
}

void Trainer::log_to_tensorboard(const observe::StepMetrics& metrics) {
  observe::Scalars scalars = observe::titan_scalars(metrics, world_->size(), options_.device);
  scalars.emplace_back("n_tokens_seen", static_cast<double>(position_.samples * options_.seq));
  tensorboard_->write(metrics.step, scalars);
}

/// A slow kernel shows in the log before it shows in the step's time.
std::string Trainer::attention_of_a_rank() const {
  const std::int64_t tp = mesh_.size("tp");
  return nn::to_string(nn::attention_kernel(
      at::device(c10::Device(options_.device)).dtype(scalar_type(options_.param_dtype)),
      config_.num_attention_heads / tp,
      config_.num_key_value_heads * key_value_copies(config_, tp) / tp, options_.seq,
      config_.head_dim,
      options_.document_mask || options_.cp > 1 ||
          (config_.sliding_window > 0 && options_.seq > config_.sliding_window)));
}

/// Where not all are trained.
std::string Trainer::trained_share() const {
  std::int64_t trained = 0;
  bool all = true;
  for (const nn::SlotPtr& slot : parameters_) {
    const at::Tensor& parameter = slot->persistent();
    trained += parameter.requires_grad() ? parameter.numel() : 0;
    all = all && parameter.requires_grad();
  }
  return all ? "" : fmt::format("  trained: {}", trained);
}

/// What adapters were trained beside.
std::string Trainer::base_model() const {
  return options_.model.empty() ? std::filesystem::path(options_.config).parent_path().string()
                                : options_.model;
}

void Trainer::print_start() const {
  std::cout << to_string(mesh_) << "  parameters: " << count_parameters(config_).total
            << trained_share() << "  device: " << options_.device << " (" << options_.param_dtype
            << ")"
            << "  attention: " << attention_of_a_rank() << std::endl;
  if (const std::string copies = describe_key_value_copies(config_, mesh_.size("tp"));
      !copies.empty()) {
    std::cout << copies << std::endl;
  }
  if (peak_flops_ && !options_.peak_flops.empty()) {
    std::cout << fmt::format("peak: {:.4g} TFLOP/s a rank in {}{}", *peak_flops_ / 1e12,
                             options_.param_dtype,
                             options_.peak_flops == "measure" ? ", measured" : "")
              << std::endl;
  }
  if (checkpoints_ && !checkpoints_->source().empty()) {
    std::cout << "loaded " << checkpoints_->source().string() << ", step "
              << checkpoints_->loaded_step() << ": " << position_.step << " steps are done"
              << std::endl;
  }
}

/// The export is collective; the report is rank 0's.
void Trainer::write_outputs() {
  // Collective, so before the return of the other ranks.
  if (!options_.save_lora.empty()) {
    checkpoint::save_lora(*model_, *world_, options_.save_lora, base_model());
  }
  if (options_.merge_lora) {
    nn::merge_lora(*model_);
  }
  if (!options_.save_hf.empty()) {
    if (const auto beside = files_beside_weights(options_); is_main() && beside) {
      checkpoint::copy_beside_weights(*beside, options_.save_hf);
    }
    checkpoint::save_hugging_face(*model_, *world_, options_.save_hf, config_.json,
                                  scalar_type(options_.save_hf_dtype));
  }
  if (!is_main() || options_.metrics.empty()) {
    return;
  }
  const std::filesystem::path report = report_file(options_);
  observe::write_report({.title = "llama_train on " + to_string(mesh_),
                         .configuration = options_.listing,
                         .sharding = observe::sharding_table(*model_),
                         .steps = history_,
                         .sample = ""},
                        report);
  std::cout << "report: " << report.string() << std::endl;
}

}  // namespace llama
