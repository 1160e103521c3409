// Trains a vision transformer on a mesh of FSDP x tensor parallelism with sequence parallelism.
//   tessera-run --nproc 4 -- build/bin/vit_train --dp 2 --tp 2 --metrics m.jsonl --save-hf model
//   vit_train --dp 64 --tp 4 --batch 4096 --plan --gpu h100

#include <ATen/ops/arange.h>
#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <map>
#include <optional>
#include <string>

#include "examples/vit/vit.h"
#include "tessera/kernels/products.h"

using namespace tessera;

/// A rank's images and labels of one step.
struct Images {
  at::Tensor pixels;  ///< (rows, channels, height, width), fp32, in [-1, 1)
  at::Tensor labels;  ///< (rows), int64
};

/// The rows of rank `rank` of `ranks` in step `step` (from 0) of an endless data set: stripes,
/// whose direction is the label. The images are computed from integers, so that other
/// implementations can produce the same bits.
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

/// The flags of vit_train.
struct Options {
  vit::Config config{};
  training::CheckpointOptions checkpoints{.every = 50, .steps = 100, .keep = 2};
  std::string config_file{}, metrics{}, save_hf{}, gpu{};
  std::int64_t batch = 64, dp = 1, tp = 1;
  double lr = 1e-3;
  bool plan = false, json = false;

  /// The values that must be equal on all ranks; for folders, only whether a folder is given.
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

/// Throws Error if an output would replace the file of --config.
void check_outputs(const Options& o) {
  const std::map<std::string, std::string> outputs{
      {"--metrics", o.metrics}, {"--checkpoint", o.checkpoints.folder}, {"--save-hf", o.save_hf}};
  for (const auto& [flag, path] : outputs) {
    std::error_code none;
    TESSERA_CHECK(path.empty() || !std::filesystem::equivalent(path, o.config_file, none), flag,
                  " is ", path, ", the file of --config: give another name");
  }
}

/// Reads the command line. Returns nullopt after printing --help. Throws Error or CLI::ParseError
/// for values that no run can have.
std::optional<Options> parse(int argc, char** argv) {
  Options o;
  o.checkpoints.names = {.program = "vit_train", .dashes = "--"};
  CLI::App app("Trains a vision transformer on images of stripes");
  const CLI::Range positive(1, 1 << 24), natural(0, 1 << 24);
  app.add_option("--config", o.config_file, "JSON file with the sizes of the model");
  app.add_option("--steps", o.checkpoints.steps, "of the whole run")->check(natural);
  app.add_option("--batch", o.batch, "images of all ranks in a step")->check(positive);
  app.add_option("--dp", o.dp, "ranks of FSDP")->check(positive);
  app.add_option("--tp", o.tp, "ranks of tensor parallelism")->check(positive);
  app.add_option("--lr", o.lr, "highest learning rate")->check(CLI::Range(1e-12, 1e6));
  app.add_option("--metrics", o.metrics, "JSONL file, one line a step");
  app.add_option("--checkpoint", o.checkpoints.folder, "folder of steps");
  app.add_option("--checkpoint-every", o.checkpoints.every, "steps; 0: only at the end")
      ->check(natural)
      ->needs("--checkpoint");
  app.add_flag_callback(
         "--resume", [&] { o.checkpoints.resume = training::Resume::kAuto; },
         "continue from the newest step, if there is one")
      ->needs("--checkpoint");
  app.add_option("--save-hf", o.save_hf, "folder for config.json and model.safetensors");
  app.add_flag("--plan", o.plan, "print what each rank would hold and send, and end");
  app.add_option("--gpu", o.gpu, "what it is planned for, with times: h100, ..., or a file")
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

/// The model, its optimizer and a step, on one rank of the mesh.
struct Run {
  Run(const Options& o, const comm::WorldPtr& world) : o(o), world(world) {}

  /// Runs the next step on this rank's rows of the batch.
  observe::StepMetrics step() {
    const StrictScope strict;  // implicit communication outside of parallel styles and FSDP throws
                               // Error
    meter.begin();
    const Images images = stripes(o.config, state.step, o.batch, mesh.local_rank("dp"), o.dp);
    meter.data_ready();
    const training::StepResult result = training::step(
        state, mesh["dp"], {.batch = o.batch, .schedule = schedule}, [&](std::int64_t) {
          return tensor_parallel::cross_entropy(
              (*model)(images.pixels), images.labels,
              {.over = mesh["dp"]});  // ranks may have different numbers of rows
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
  observe::count_tensor_memory();  // so that metrics include peak memory, to compare with a plan
  const comm::WorldPtr world = comm::world_from_environment();
  training::check_same_options(*world, o.shared());
  training::Checkpointer checkpoints(o.checkpoints, world);
  Run run(o, world);
  const nlohmann::json entries{{"config", o.config}};
  if (checkpoints.loads()) {
    const nlohmann::json saved = checkpoints.peek(run.state).value("config", nlohmann::json());
    TESSERA_CHECK(saved == entries["config"], "--checkpoint ", o.checkpoints.folder.string(),
                  " is of another model, ", saved.dump(), "; give its --config, or another folder");
    checkpoints.load(run.state);
  }
  if (!o.save_hf.empty() && world->rank() == 0) {
    checkpoint::check_save_hugging_face(*run.model, o.save_hf, entries["config"].dump(2));
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
  // The sizes in which ranks may differ: the rank's rows of the batch, and its tokens of each row.
  const auto sizes = [&](const std::vector<std::int64_t>& at) -> std::vector<std::int64_t> {
    return {o.batch * (at[0] + 1) / o.dp - o.batch * at[0] / o.dp,
            chunk_size(1 + o.config.patches(), o.tp, at[1])};
  };
  const auto make = [&](const comm::WorldPtr& world) -> planning::Run {
    const auto run = std::make_shared<Run>(o, world);
    return {run->model, run->mesh, [run] { run->step(); }, sizes};
  };
  planning::PlanOptions options{.tokens = o.batch};
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
