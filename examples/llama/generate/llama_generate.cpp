// llama_generate: continues texts, or prints the perplexity of a text.

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <memory>
#include <utility>

#include "examples/llama/cli.h"
#include "examples/llama/generate/generate.h"
#include "examples/llama/generate/generate_options.h"
#include "examples/llama/start.h"
#include "tessera/comm/world.h"
#include "tessera/data/text.h"
#include "tessera/kernels/products.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/freeze.h"
#include "tessera/tessera.hpp"

namespace llama {

/// Creates the mesh ("tp") of a run. Throws tessera::Error unless --tp equals the number of ranks
/// that the launcher has started.
tessera::DeviceMesh make_generation_mesh(const GenerateOptions& options,
                                         const tessera::comm::WorldPtr& world);

/// Loads the weights of options.model in the type options.dtype. Each rank loads only its own
/// weights. The rotary tables have `positions` rows. With `split_logits`, the model returns logits
/// that are split over the vocabulary, which the loss takes. Without, each rank gets all logits.
/// Collective.
std::shared_ptr<Llama> load_model(const GenerateOptions& options, const Config& config,
                                  std::int64_t positions, const tessera::DeviceMesh& mesh,
                                  bool split_logits);

using namespace tessera;

DeviceMesh make_generation_mesh(const GenerateOptions& o, const comm::WorldPtr& world) {
  TESSERA_CHECK(o.tp == world->size(), "--tp ", o.tp, " is ", o.tp, o.tp == 1 ? " rank" : " ranks",
                ", but ", world->size(), world->size() == 1 ? " is" : " are", " running; start ",
                o.tp, " (tessera-run --nproc ", o.tp, ") or change --tp");
  return init_device_mesh(world, {o.tp}, {"tp"});
}

namespace {

/// Freezes the weights, because generation has no backward. First runs one forward with gradients,
/// because in its autograd graph the parallel styles detect gaps of the tensor-parallel plan.
void check_plan_and_freeze(Llama& model, const c10::Device& device) {
  const c10::AutoGradMode gradients(true);
  model(at::zeros({1, 1}, at::TensorOptions(c10::kLong).device(device)));
  nn::freeze(model, {"**"});
}

}  // namespace

std::shared_ptr<Llama> load_model(const GenerateOptions& options, const Config& config,
                                  std::int64_t positions, const DeviceMesh& mesh,
                                  bool split_logits) {
  std::shared_ptr<Llama> model;
  {
    const nn::MetaDevice meta;
    model = std::make_shared<Llama>(config, positions);
  }
  model->to(scalar_type(options.dtype));
  apply_tensor_parallel(*model, mesh, {.sequence_parallel = false, .loss_parallel = split_logits});
  nn::to_empty(*model, c10::Device(options.device));
  // Computes the rotary tables, which the files do not contain.
  nn::init_buffers(*model);
  checkpoint::load_hugging_face(*model, *mesh.world(), options.model);
  nn::check_initialized(*model);
  model->eval();
  check_plan_and_freeze(*model, options.device);
  return model;
}

}  // namespace llama

namespace {

using namespace tessera;
using llama::GenerateOptions;

/// What is known of a run before the model is loaded.
struct Run {
  const GenerateOptions& options;
  llama::Config config;
  llama::PromptEncoder encoder;
  DeviceMesh mesh;

  bool prints() const { return mesh.local_rank() == 0; }
};

/// Prints a line with one write, because several ranks may share the stream.
void note(const Run& run, const std::string& line) {
  if (run.prints()) {
    std::cerr << line + "\n" << std::flush;
  }
}

double per_second(std::int64_t tokens, double seconds) {
  return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
}

/// The prompts of a run: as the model's tokens, and as the printed texts.
struct Prompts {
  std::vector<llama::Tokens> inputs;
  std::vector<llama::GrowingText> texts;
  std::int64_t longest = 0;
};

Prompts read_prompts(const Run& run) {
  Prompts prompts;
  for (const auto& [text, is_whole] :
       llama::prompt_texts(run.options, llama::standard_input(run.options, run.mesh))) {
    const llama::Tokens tokens = run.encoder.encode(text);
    prompts.inputs.push_back(is_whole ? tokens : run.encoder.with_begin_tokens(tokens));
    prompts.longest = std::max(prompts.longest, std::ssize(prompts.inputs.back()));
    if (run.prints()) {
      prompts.texts.emplace_back(text, tokens, run.encoder.tokenizer(), run.options.stop);
    }
  }
  llama::check_same_texts(*run.mesh.world(), prompts.inputs);
  return prompts;
}

void generate(const Run& run) {
  Prompts prompts = read_prompts(run);
  const llama::SamplingOptions& sampling = run.options.sampling;
  if (const std::string warning =
          llama::check_positions(run.config, prompts.longest, sampling.max_tokens);
      !warning.empty()) {
    note(run, warning);
  }
  const auto model =
      llama::load_model(run.options, run.config, prompts.longest + sampling.max_tokens, run.mesh,
                        /*split_logits=*/false);
  llama::TextWriter writer(std::cout, std::move(prompts.texts), run.options.json,
                           sampling.max_tokens);
  const auto sink = [&](std::size_t index, std::int64_t token) {
    return writer.push(index, token);
  };
  const llama::GenerationTimes times =
      llama::generate(*model, prompts.inputs, sampling, run.encoder.end_tokens(), sink,
                      run.mesh.size() > 1 ? &run.mesh.group() : nullptr);
  writer.finish();
  note(run, fmt::format("prompt: {} tokens, {:.1f} tokens/s; decoding: {} tokens, {:.1f} tokens/s",
                        times.prompt_tokens, per_second(times.prompt_tokens, times.prompt_s),
                        times.tokens, per_second(times.tokens, times.decoding_s)));
}

void measure_perplexity(const Run& run) {
  const GenerateOptions& options = run.options;
  const llama::TextWindows windows = llama::perplexity_windows(options, run.config);
  const llama::Tokens text =
      run.encoder.with_begin_tokens(run.encoder.encode(data::read_text(options.perplexity)));
  llama::check_same_texts(*run.mesh.world(), {text});
  const auto model =
      llama::load_model(options, run.config, windows.size, run.mesh, /*split_logits=*/true);
  const llama::TextLoss loss = llama::text_loss(*model, text, windows.size, windows.stride);
  TESSERA_CHECK(std::isfinite(std::exp(loss.mean)), "the perplexity of '", options.perplexity,
                "' is no number, as its mean loss is ", loss.mean,
                "; look at the weights of the model, or take --dtype fp32");
  if (run.prints()) {
    llama::print_perplexity(loss, options.json);
  }
}

int run_generate(std::vector<std::string> arguments) {
  const GenerateOptions options = llama::parse_generate_options(std::move(arguments));
  const comm::WorldScope scope(comm::world_from_environment(
      {.device = options.device, .backend = options.device == "cuda" ? "nccl" : "gloo"}));
  llama::Config config = llama::read_config(std::filesystem::path(options.model) / "config.json");
  llama::check_same_start(*scope.world(), options.shared, config);
  const Run run{options,
                config,
                {options.model, options.tokenizer, config},
                llama::make_generation_mesh(options, scope.world())};
  if (const std::string copies = llama::describe_key_value_copies(config, options.tp);
      !copies.empty()) {
    note(run, copies);
  }
  const StrictScope strict;
  try {
    (options.perplexity.empty() ? generate : measure_perplexity)(run);
  } catch (const c10::Error& error) {
    // c10::Error is, for example, out of memory. what() would include the stack trace.
    fail("rank ", scope.world()->rank(), ": ", error.what_without_backtrace());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  tessera::kernels::use_fast_products();
  return llama::run_program("llama_generate", argc, argv, run_generate);
}
