#include "examples/llama/train/run_outputs.h"

#include <fmt/format.h>

#include <filesystem>
#include <iostream>
#include <string>

#include "examples/llama/same_start.h"
#include "examples/llama/scalar_type.h"
#include "examples/llama/train/options/outputs.h"
#include "examples/llama/train/run_folder.h"
#include "examples/llama/train/setup.h"
#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"

namespace llama {

using namespace tessera;

namespace {

/// What adapters were trained beside.
std::string base_model(const TrainOptions& options) {
  return options.model.empty() ? std::filesystem::path(options.config).parent_path().string()
                               : options.model;
}

void open_outputs(const LlamaRun& run, training::Checkpointer& checkpoints,
                  training::MetricLog& log) {
  const TrainOptions& options = run.options;
  if (!options.save_hf.empty()) {
    checkpoint::check_save_hugging_face(*run.model, options.save_hf, run.config.json,
                                        scalar_type(options.save_hf_dtype));
    if (const auto beside = files_beside_weights(options)) {
      checkpoint::check_beside_weights(*beside, options.save_hf);
    }
  }
  if (!options.save_lora.empty()) {
    checkpoint::check_save_lora(*run.model, options.save_lora, base_model(options));
  }
  checkpoints.make_folder();
  if (!options.output_dir.empty()) {
    take_run_folder(options, checkpoints.resumes());
  }
  log.open(run.state.step);
}

/// A slow kernel shows in the log before it shows in the step's time.
std::string attention_of_a_rank(const LlamaRun& run) {
  const TrainOptions& options = run.options;
  const Config& config = run.config;
  const std::int64_t tp = run.mesh.size("tp");
  const bool window = config.sliding_window > 0 && options.seq > config.sliding_window;
  nn::AttentionKernel kernel = nn::attention_kernel(
      at::device(c10::Device(options.device)).dtype(scalar_type(options.param_dtype)),
      config.num_attention_heads / tp,
      config.num_key_value_heads * key_value_copies(config, tp) / tp, options.seq, config.head_dim,
      /*masked=*/options.cp > 1 && window);
  if (options.cp == 1 && (options.document_mask || window)) {
    kernel = nn::packed_kernel(kernel);
  }
  return nn::to_string(kernel) + (options.deterministic ? ", deterministic" : "");
}

/// Where not all are trained.
std::string trained_share(const Llama& model) {
  std::int64_t trained = 0;
  bool all = true;
  for (const nn::SlotPtr& slot : optim::slots_of(model)) {
    const at::Tensor& parameter = slot->persistent();
    trained += parameter.requires_grad() ? parameter.numel() : 0;
    all = all && parameter.requires_grad();
  }
  return all ? "" : fmt::format("  trained: {}", trained);
}

std::string fp8_share(const Llama& model) {
  std::int64_t linears = 0;
  nn::visit_modules(model, [&](const std::string&, const nn::ModuleBase& module) {
    const auto* linear = dynamic_cast<const nn::Linear*>(&module);
    linears += linear != nullptr && !linear->weight.slot()->of_adapter();
  });
  return fmt::format("fp8: {} of {} linear layers", nn::fp8_weights(model).size(), linears);
}

}  // namespace

/// Agreed on: the others would otherwise set out and miss rank 0, which does the work.
void prepare_outputs(const LlamaRun& run, training::Checkpointer& checkpoints,
                     training::MetricLog& log) {
  comm::run_or_fail_together(*start_group(*run.world), c10::kCPU, [&] {
    if (run.is_main()) {
      open_outputs(run, checkpoints, log);
    }
  });
}

void print_start(const LlamaRun& run, const training::Checkpointer& checkpoints,
                 std::optional<double> peak_flops) {
  if (!run.is_main()) {
    return;
  }
  const TrainOptions& options = run.options;
  std::cout << to_string(run.mesh) << "  parameters: " << count_parameters(run.config).total
            << trained_share(*run.model) << "  device: " << options.device << " ("
            << options.param_dtype << ")"
            << "  attention: " << attention_of_a_rank(run) << std::endl;
  if (const std::string copies = describe_key_value_copies(run.config, run.mesh.size("tp"));
      !copies.empty()) {
    std::cout << copies << std::endl;
  }
  if (options.fp8) {
    std::cout << fp8_share(*run.model) << std::endl;
  }
  if (peak_flops && !options.peak_flops.empty()) {
    std::cout << fmt::format("peak: {:.4g} TFLOP/s a rank in {}{}", *peak_flops / 1e12,
                             options.param_dtype,
                             options.peak_flops == "measure" ? ", measured" : "")
              << std::endl;
  }
  if (checkpoints.loads()) {
    std::cout << "loaded " << checkpoints.source().string() << ", step "
              << checkpoints.loaded_step() << ": " << run.state.step << " steps are done"
              << std::endl;
  }
}

void export_weights(LlamaRun& run) {
  const TrainOptions& options = run.options;
  if (!options.save_lora.empty()) {
    checkpoint::save_lora(*run.model, *run.world, options.save_lora, base_model(options));
  }
  if (options.merge_lora) {
    nn::merge_lora(*run.model);
  }
  if (!options.save_hf.empty()) {
    if (const auto beside = files_beside_weights(options); run.is_main() && beside) {
      checkpoint::copy_beside_weights(*beside, options.save_hf);
    }
    checkpoint::save_hugging_face(*run.model, *run.world, options.save_hf, run.config.json,
                                  scalar_type(options.save_hf_dtype));
  }
}

void write_report(const LlamaRun& run, const training::MetricLog& log) {
  const bool has_place =
      std::filesystem::is_regular_file(run.options.metrics) || !run.options.output_dir.empty();
  if (!run.is_main() || run.options.metrics.empty() || !has_place) {
    return;  // beside a pipe there is no place for it
  }
  const std::filesystem::path report = report_file(run.options);
  observe::write_report({.title = "llama_train on " + to_string(run.mesh),
                         .configuration = run.options.listing,
                         .sharding = observe::sharding_table(*run.model),
                         .steps = log.history(),
                         .sample = ""},
                        report);
  std::cout << "report: " << report.string() << std::endl;
}

}  // namespace llama
