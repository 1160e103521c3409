// Trains a vision transformer (Dosovitskiy et al. 2021) on a mesh of FSDP x tensor parallelism with
// sequence parallelism. Queries and keys are normalized (Dehghani et al. 2023). Parameter names and
// sizes are timm's. tensor_parallel_plan() and make_model() split the one-rank model.
//   tessera-run --nproc 4 -- build/bin/vit_train --dp 2 --tp 2 --metrics m.jsonl --save-hf model
//   vit_train --dp 64 --tp 4 --batch 4096 --plan --gpu h100

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <torch/nn/modules/conv.h>
#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/kernels/products.h"
#include "tessera/tessera.hpp"

using namespace tessera;

namespace vit {

/// The sizes of a vision transformer, under the names in config.json.
struct Config {
  std::int64_t image_size = 32;  ///< height and width of an image, in pixels
  std::int64_t channels = 3;
  std::int64_t patch_size = 4;  ///< height and width of a patch; must divide image_size
  std::int64_t dim = 64;        ///< number of features of a token
  std::int64_t depth = 4;       ///< number of blocks
  std::int64_t heads = 4;       ///< attention heads; must divide dim
  std::int64_t mlp_dim = 256;
  std::int64_t classes = 10;
  double dropout = 0.1;  ///< dropout of the embeddings, and of the outputs of attention and MLP

  std::int64_t patches() const { return (image_size / patch_size) * (image_size / patch_size); }
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Config, image_size, channels, patch_size, dim,
                                                depth, heads, mlp_dim, classes, dropout)

/// Reads a config.json; missing keys keep their defaults. Throws Error for a file that is not a
/// JSON object, for unknown keys, and for impossible sizes.
Config read_config(const std::string& path) {
  const std::string text = files::read_file(path, "a config.json", 1 << 20);
  const nlohmann::json known = Config{};
  try {
    check_strict_json(text);
  } catch (const Error& error) {
    fail(path, ": ", error.what(), "; write an object such as ", known.dump());
  }
  const nlohmann::json json = nlohmann::json::parse(text);
  for (const auto& [name, value] : json.items()) {
    TESSERA_CHECK(known.contains(name), path, ": \"", name,
                  "\" is an unknown key; use only the keys of ", known.dump());
    const bool is_size = known[name].is_number_integer();
    TESSERA_CHECK(is_size ? value.is_number_integer() && value >= 1 && value <= 1 << 20
                          : value.is_number() && value >= 0 && value < 1,
                  path, ": \"", name, "\" is ", value.dump(), ", but must be ",
                  is_size ? "an integer from 1 to 1048576" : "a number of at least 0, below 1");
  }
  const Config c = json;
  TESSERA_CHECK(c.image_size % c.patch_size == 0 && c.dim % c.heads == 0, path,
                ": patch_size must divide image_size, and heads must divide dim, in ",
                nlohmann::json(c).dump());
  return c;
}

const nn::LayerNormOptions kNorm{.eps = 1e-6};

/// Embeds the patches of images: (batch, channels, height, width) -> (batch, patches, dim).
struct PatchEmbed : nn::Module<PatchEmbed> {
  explicit PatchEmbed(const Config& c)
      : proj(*this, "proj",
             torch::nn::Conv2dOptions(c.channels, c.dim, c.patch_size).stride(c.patch_size)) {}
  at::Tensor forward(const at::Tensor& images) { return proj(images).flatten(2).transpose(1, 2); }
  nn::Child<nn::Hooked<torch::nn::Conv2d>> proj;
};

/// Self-attention: (batch, tokens, dim) -> (batch, tokens, dim).
struct Attention : nn::Module<Attention> {
  explicit Attention(const Config& c)
      : heads(c.heads),
        qkv(*this, "qkv", c.dim, 3 * c.dim),
        q_norm(*this, "q_norm", c.dim / c.heads, kNorm),
        k_norm(*this, "k_norm", c.dim / c.heads, kNorm),
        proj(*this, "proj", c.dim, c.dim) {}
  at::Tensor forward(const at::Tensor& x) {
    std::vector<at::Tensor> parts = qkv(x).chunk(3, -1);
    for (at::Tensor& part : parts) {  // reshapes `part` to (batch, tokens, heads, dim / heads)
      part = part.unflatten(-1, {heads, part.size(-1) / heads});
    }
    const at::Tensor mixed =
        nn::attention(q_norm(parts[0]).transpose(1, 2), k_norm(parts[1]).transpose(1, 2),
                      parts[2].transpose(1, 2), /*causal=*/false);
    return proj(mixed.transpose(1, 2).flatten(2));
  }
  std::int64_t heads;
  nn::Child<nn::Linear> qkv;
  nn::Child<nn::LayerNorm> q_norm, k_norm;
  nn::Child<nn::Linear> proj;
};

nn::MlpOptions mlp_options(const Config& c) {
  return {.hidden = c.dim, .inner = c.mlp_dim, .bias = true, .names = {.up = "fc1", .down = "fc2"}};
}

struct Block : nn::Module<Block> {
  explicit Block(const Config& c)
      : norm1(*this, "norm1", c.dim, kNorm),
        attn(*this, "attn", c),
        norm2(*this, "norm2", c.dim, kNorm),
        mlp(*this, "mlp", mlp_options(c), /*tanh=*/false),
        drop1(*this, "drop1", c.dropout),
        drop2(*this, "drop2", c.dropout) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = x + drop1(attn(norm1(x)));
    return h + drop2(mlp(norm2(h)));
  }
  nn::Child<nn::LayerNorm> norm1;
  nn::Child<Attention> attn;
  nn::Child<nn::LayerNorm> norm2;
  nn::Child<nn::GeluMlp> mlp;
  nn::Child<nn::Dropout> drop1, drop2;
};

/// The model: maps images, (batch, channels, height, width), to logits, (batch, classes).
struct VisionTransformer : nn::Module<VisionTransformer>, tensor_parallel::DeclaresPlan {
  explicit VisionTransformer(const Config& c)
      : config(c),
        patch_embed(*this, "patch_embed", c),
        pos_drop(*this, "pos_drop", c.dropout),
        blocks(*this, "blocks"),
        norm(*this, "norm", c.dim, kNorm),
        head(*this, "head", c.dim, c.classes) {
    for (std::int64_t i = 0; i < c.depth; ++i) {
      blocks->push_back(std::make_shared<Block>(c));
    }
    cls_token = register_slot("cls_token", {1, 1, c.dim});
    pos_embed = register_slot("pos_embed", {1, 1 + c.patches(), c.dim});
  }
  at::Tensor forward(const at::Tensor& images) {
    const at::Tensor patches = patch_embed(images);
    const at::Tensor token = cls_token->expand({patches.size(0), -1, -1});
    const at::Tensor x = blocks(pos_drop(at::cat({token, patches}, 1) + *pos_embed));
    return head(norm(x).select(1, 0));  // select() returns the class token
  }
  void reset_parameters(const nn::InitContext& init) override {
    init.fill(*this, {{"cls_token", nn::init::normal(0, 1e-6)},
                      {"pos_embed", nn::init::trunc_normal(0, 0.02)},
                      {"patch_embed.proj.weight", nn::init::trunc_normal(0, 0.02)},
                      {"**.qkv.weight", nn::init::trunc_normal(0, 0.02)},
                      {"**.attn.proj.weight", nn::init::trunc_normal(0, 0.02)},
                      {"head.weight", nn::init::trunc_normal(0, 0.02)},
                      {"**.bias", nn::init::zeros()}});
  }
  /// Returns a plan that splits attention heads and MLP features over the ranks, and the tokens
  /// between blocks (sequence parallelism, Korthikanti et al. 2022).
  tensor_parallel::ParallelizePlan tensor_parallel_plan(
      const DeviceMesh&, const tensor_parallel::DeclaredPlanOptions& options) const override {
    using namespace tensor_parallel;
    const Placement tokens = options.sequence_parallel ? Placement(Shard{1}) : Replicate{};
    ParallelizePlan plan = joined(
        {{{"blocks.*.attn.qkv", fused_colwise_parallel({.parts = 3, .regather = options.regather})},
          {"blocks.*.attn.proj",
           rowwise_parallel({.output_layouts = tokens, .heads = config.heads})}},
         gelu_mlp_plan("blocks.*.mlp", mlp_options(config).names,
                       {.activations = tokens, .regather = options.regather}),
         {{"head", colwise_parallel()}}});
    if (options.sequence_parallel) {
      plan.emplace_back("pos_drop", sequence_parallel());
      plan.emplace_back("norm",
                        replicate_parallel());  // forward() selects the class token
    }
    return plan;
  }

  Config config;
  nn::Parameter cls_token, pos_embed;
  nn::Child<PatchEmbed> patch_embed;
  nn::Child<nn::Dropout> pos_drop;
  nn::Child<nn::Sequential> blocks;
  nn::Child<nn::LayerNorm> norm;
  nn::Child<nn::Linear> head;
};

/// Creates and initializes the model on a mesh of "dp" and "tp". Each block is an FSDP unit, and a
/// rank allocates only its shards.
std::shared_ptr<VisionTransformer> make_model(const Config& config, const DeviceMesh& mesh,
                                              std::uint64_t seed) {
  auto model = [&] {
    const nn::MetaDevice meta;
    return std::make_shared<VisionTransformer>(config);
  }();
  tensor_parallel::parallelize_module(*model, mesh["tp"]);
  nn::visit_modules(*model, [&](const std::string&, nn::ModuleBase& module) {
    if (dynamic_cast<Block*>(&module) != nullptr) {
      fsdp::fully_shard(module, mesh["dp"]);
    }
  });
  fsdp::fully_shard(*model, mesh["dp"]);
  nn::to_empty(*model, mesh.device());
  nn::init_weights(*model, seed);
  return model;
}

}  // namespace vit

/// The images and labels of one rank in one training step.
struct Images {
  at::Tensor pixels;  ///< images (rows, channels, height, width), fp32, in [-1, 1)
  at::Tensor labels;  ///< class indices, (rows) int64
};

/// Returns the samples of rank `rank` of `ranks` in step `step` (from 0) of an endless data set of
/// stripes. The label is the direction of the stripes. Integer computation gives the same bits in
/// all programs.
Images stripes(const vit::Config& c, std::int64_t step, std::int64_t batch, std::int64_t rank,
               std::int64_t ranks) {
  const at::Tensor sample =
      step * batch + at::arange(batch * rank / ranks, batch * (rank + 1) / ranks);
  const at::Tensor hash = (sample * 2654435761 + 12345).remainder(1LL << 32);
  const at::Tensor label = hash.floor_divide(256).remainder(c.classes);
  const at::Tensor position = at::arange(c.image_size), channel = at::arange(c.channels);
  const auto of_sample = [](const at::Tensor& x) { return x.view({-1, 1, 1, 1}); };
  const at::Tensor phase = of_sample(label.remainder(3)) * position.view({-1, 1}) +
                           of_sample(label.floor_divide(3)) * position +
                           of_sample(hash.remainder(8)) + channel.view({-1, 1, 1});
  return {phase.remainder(8).to(at::kFloat) / 4 - 1, label};
}

struct Options {
  vit::Config config{};
  training::CheckpointOptions checkpoints{.every = 50, .steps = 100, .keep = 2};
  std::string config_file{}, metrics{}, save_hf{}, gpu{};
  std::int64_t batch = 64, dp = 1, tp = 1;
  double lr = 1e-3;
  bool plan = false, json = false;

  /// The flags and values that must be equal on all ranks. For a flag that names a folder, ranks
  /// only compare whether the flag is given.
  std::map<std::string, std::string> shared() const {
    return {{"--config", nlohmann::json(config).dump()},
            {"--steps", std::to_string(checkpoints.steps)},
            {"--batch", std::to_string(batch)},
            {"--dp", std::to_string(dp)},
            {"--tp", std::to_string(tp)},
            {"--lr", nlohmann::json(lr).dump()},
            {"--checkpoint", checkpoints.folder.empty() ? "" : "DIR"},
            {"--checkpoint-every", std::to_string(checkpoints.every)},
            {"--resume", checkpoints.resume == training::Resume::kAuto ? "given" : ""},
            {"--save-hf", save_hf.empty() ? "" : "DIR"}};
  }
};

/// Returns the absolute path without symbolic links or a final slash.
std::filesystem::path place_of(const std::string& path) {
  const std::filesystem::path place =
      std::filesystem::weakly_canonical(std::filesystem::absolute(path));
  return place.has_filename() ? place : place.parent_path();
}

/// Throws Error if an output would replace the file of --config or another output.
void check_outputs(const Options& o) {
  const std::vector<std::pair<std::string, std::string>> files{
      {"--config", o.config_file},
      {"--metrics", o.metrics},
      {"--checkpoint", o.checkpoints.folder},
      {"--save-hf", o.save_hf}};
  std::map<std::filesystem::path, std::string> flag_of;
  for (const auto& [flag, path] : files) {
    if (path.empty()) {
      continue;
    }
    const auto [known, is_new] = flag_of.try_emplace(place_of(path), flag);
    TESSERA_CHECK(is_new, flag, " and ", known->second, " are both ", path,
                  "; pass different paths");
  }
}

/// Parses the command line. Returns nullopt if --help was printed. Throws Error or CLI::ParseError
/// for invalid values.
std::optional<Options> parse(int argc, char** argv) {
  Options o;
  o.checkpoints.names = {.program = "vit_train", .dashes = "--"};
  CLI::App app("Trains a vision transformer on images of stripes");
  const CLI::Range positive(1, 1 << 24), natural(0, 1 << 24);
  app.add_option("--config", o.config_file, "JSON file with the sizes of the model");
  app.add_option("--steps", o.checkpoints.steps, "steps of the whole run")->check(natural);
  app.add_option("--batch", o.batch, "images per step, over all ranks")->check(positive);
  app.add_option("--dp", o.dp, "ranks of FSDP")->check(positive);
  app.add_option("--tp", o.tp, "ranks of tensor parallelism")->check(positive);
  app.add_option("--lr", o.lr, "highest learning rate")->check(CLI::Range(1e-12, 1e6));
  app.add_option("--metrics", o.metrics, "JSONL file with one line per step");
  app.add_option("--checkpoint", o.checkpoints.folder, "folder of checkpoints");
  app.add_option("--checkpoint-every", o.checkpoints.every,
                 "steps between checkpoints; 0: only at the end")
      ->check(natural)
      ->needs("--checkpoint");
  app.add_flag_callback(
         "--resume", [&] { o.checkpoints.resume = training::Resume::kAuto; },
         "continue from the newest checkpoint, if any")
      ->needs("--checkpoint");
  app.add_option("--save-hf", o.save_hf, "folder for config.json and model.safetensors");
  app.add_flag("--plan", o.plan, "print the memory and communication of each rank, and exit");
  app.add_option("--gpu", o.gpu, "GPU for which --plan estimates times: h100, ..., or a file")
      ->needs("--plan");
  app.add_flag("--json", o.json, "print the plan as JSON")->needs("--plan");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return std::nullopt;
  }
  check_outputs(o);
  if (!o.config_file.empty()) {
    o.config = vit::read_config(o.config_file);
  }
  return o;
}

struct Run {
  Run(const Options& o, const comm::WorldPtr& world) : o(o), world(world) {}

  observe::StepMetrics step() {
    const StrictScope strict;  // throws Error for implicit communication
    meter.begin();
    const Images images = stripes(o.config, state.step, o.batch, mesh.local_rank("dp"), o.dp);
    meter.data_ready();
    const training::StepResult result = training::step(
        state, mesh["dp"], {.batch = o.batch, .schedule = schedule}, [&](std::int64_t) {
          return tensor_parallel::cross_entropy(
              (*model)(images.pixels), images.labels,
              {.over = mesh["dp"]});  // ranks can have different numbers of samples
        });
    return meter.end(state, result, o.lr * result.lr_factor);
  }

  Options o;
  comm::WorldPtr world;
  DeviceMesh mesh = init_device_mesh(world, {o.dp, o.tp}, {"dp", "tp"});
  std::shared_ptr<vit::VisionTransformer> model = vit::make_model(o.config, mesh, /*seed=*/0);
  optim::AdamW optimizer{*model, {.lr = o.lr, .weight_decay = 0.05}};
  training::TrainState state{*model, optimizer};
  optim::LrSchedule schedule{{optim::Schedule::kCosine, /*warmup=*/10, o.checkpoints.steps}};
  training::StepMeter meter{world, mesh.device_type()};
};

void train(const Options& o) {
  observe::count_tensor_memory();  // adds peak memory to the metrics
  const comm::WorldPtr world = comm::world_from_environment();
  training::check_same_options(*world, o.shared());
  training::Checkpointer checkpoints(o.checkpoints, world);
  Run run(o, world);
  const nlohmann::json entries{{"config", o.config}};
  if (checkpoints.loads()) {
    const nlohmann::json saved = checkpoints.peek(run.state).value("config", nlohmann::json());
    TESSERA_CHECK(saved == entries["config"], "--checkpoint ", o.checkpoints.folder.string(),
                  " has another model, ", saved.dump(), "; pass its --config, or another folder");
    checkpoints.load(run.state);
  }
  if (world->rank() == 0) {
    checkpoints.make_folder();
    if (!o.save_hf.empty()) {
      checkpoint::check_save_hugging_face(*run.model, o.save_hf, entries["config"].dump(2));
    }
  }
  training::MetricLog log({.metrics = o.metrics, .steps = o.checkpoints.steps}, world);
  log.open(run.state.step);
  while (run.state.step < o.checkpoints.steps) {
    log.write(run.step(), /*tokens=*/0);
    checkpoints.after_step(run.state, entries);
  }
  const std::exception_ptr unsaved = checkpoints.finish(run.state, entries);
  if (!o.save_hf.empty()) {
    checkpoint::save_hugging_face(*run.model, *world, o.save_hf, entries["config"].dump(2));
  }
  if (unsaved) {
    std::rethrow_exception(unsaved);
  }
}

void plan(const Options& o) {
  // Returns the sizes that can differ between ranks: the number of samples, and tokens per sample.
  const auto sizes = [&](const std::vector<std::int64_t>& at) -> std::vector<std::int64_t> {
    return {o.batch * (at[0] + 1) / o.dp - o.batch * at[0] / o.dp,
            chunk_size(1 + o.config.patches(), o.tp, at[1])};
  };
  const auto make = [&](const comm::WorldPtr& world) -> planning::Run {
    const auto run = std::make_shared<Run>(o, world);
    return {run->model, run->mesh, [run] { run->step(); }};
  };
  planning::PlanOptions options{.tokens = o.batch, .sizes = sizes};
  if (!o.gpu.empty()) {
    options.machine = planning::machine_of(o.gpu, "--gpu");
    options.device = "cuda";
  }
  const planning::RunPlan plan = planning::plan_run(make, o.dp * o.tp, options);
  std::cout << (o.json ? planning::to_json(plan) : planning::to_text(plan)) << std::endl;
}

int main(int argc, char** argv) {
  tessera::kernels::use_fast_products();
  return comm::run_main([&] {
    if (const std::optional<Options> options = parse(argc, argv)) {
      (options->plan ? plan : train)(*options);
    }
  });
}
