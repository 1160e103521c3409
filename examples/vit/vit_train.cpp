// Trains a vision transformer on a mesh of FSDP x tensor parallelism with sequence parallelism.
//   tessera-run --nproc 4 -- build/bin/vit_train --dp 2 --tp 2 --metrics m.jsonl --save-hf model
//   vit_train --dp 64 --tp 4 --batch 4096 --plan

#include <CLI/CLI.hpp>
#include <iostream>

#include "examples/vit/stripes.h"
#include "examples/vit/vit.h"

using namespace tessera;

struct Options {
  std::string config, metrics, checkpoint, save_hf;
  std::int64_t steps = 100, batch = 64, dp = 1, tp = 1, checkpoint_every = 50;
  double lr = 1e-3;
  bool resume = false, plan = false, json = false;
};

/// The model, its optimizer and a step, on one rank of the mesh.
struct Run {
  Run(const Options& o, const vit::Config& c, const comm::WorldPtr& world)
      : o(o),
        mesh(init_device_mesh(world, {o.dp, o.tp}, {"dp", "tp"})),
        model(vit::make_model(c, mesh, /*seed=*/0)),
        optimizer(*model, {.lr = o.lr, .weight_decay = 0.05}),
        meter(world, mesh.device_type()) {}

  /// The next step, on this rank's rows of the batch.
  observe::StepMetrics step() {
    const StrictScope strict;  // refuses communication that no style and no FSDP unit makes
    meter.begin();
    const vit::Images images =
        vit::stripes(model->config, state.step, o.batch, mesh.local_rank("dp"), o.dp);
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
  DeviceMesh mesh;
  std::shared_ptr<vit::VisionTransformer> model;
  optim::AdamW optimizer;
  training::TrainState state{*model, optimizer};
  optim::LrSchedule schedule{{optim::Schedule::kCosine, /*warmup=*/10, o.steps}};
  training::StepMeter meter;
};

void train(const Options& o, const vit::Config& config) {
  observe::count_tensor_memory();  // metrics then have the peak, to compare with a plan's
  const comm::WorldPtr world = comm::world_from_environment();
  training::Checkpointer checkpoints(
      {.folder = o.checkpoint,
       .every = o.checkpoint_every,
       .steps = o.steps,
       .keep = 2,
       .resume = o.resume ? training::Resume::kAuto : training::Resume::kNever,
       .names = {.program = "vit_train", .dashes = "--"}},
      world);
  Run run(o, config, world);
  const nlohmann::json entries{{"config", config}};
  if (checkpoints.loads()) {
    const nlohmann::json saved = checkpoints.peek(run.state).value("config", nlohmann::json());
    TESSERA_CHECK(saved == entries["config"], "--checkpoint ", o.checkpoint,
                  " is of another model, ", saved.dump(), "; give its --config, or another folder");
    checkpoints.load(run.state);
  }
  training::MetricLog log({.metrics = o.metrics, .steps = o.steps}, world);
  log.open(run.state.step);
  while (run.state.step < o.steps) {
    log.write(run.step(), /*tokens=*/0);
    checkpoints.after_step(run.state, entries);
  }
  const std::exception_ptr unsaved = checkpoints.finish(run.state, entries);
  if (!o.save_hf.empty()) {
    checkpoint::save_hugging_face(*run.model, *world, o.save_hf, nlohmann::json(config).dump(2));
  }
  if (unsaved) {
    std::rethrow_exception(unsaved);
  }
}

void plan(const Options& o, const vit::Config& config) {
  const auto make = [&](const comm::WorldPtr& world) -> planning::Run {
    const auto run = std::make_shared<Run>(o, config, world);
    // The sizes of a rank: its rows of the batch, and the tokens of each that it holds.
    const auto sizes = [&](const std::vector<std::int64_t>& at) -> std::vector<std::int64_t> {
      return {o.batch * (at[0] + 1) / o.dp - o.batch * at[0] / o.dp,
              chunk_size(1 + config.patches(), o.tp, at[1])};
    };
    return {run->model, run->mesh, [run] { run->step(); }, sizes};
  };
  const planning::RunPlan plan = planning::plan_run(make, o.dp * o.tp, {.tokens = o.batch});
  std::cout << (o.json ? planning::to_json(plan) : planning::to_text(plan)) << std::endl;
}

int main(int argc, char** argv) {
  Options o;
  CLI::App app("Trains a vision transformer on images of stripes");
  app.add_option("--config", o.config, "JSON file with the sizes of the model");
  app.add_option("--steps", o.steps, "of the whole run");
  app.add_option("--batch", o.batch, "images of all ranks in a step");
  app.add_option("--dp", o.dp, "ranks of FSDP");
  app.add_option("--tp", o.tp, "ranks of tensor parallelism");
  app.add_option("--lr", o.lr, "highest learning rate");
  app.add_option("--metrics", o.metrics, "JSONL file, one line a step");
  app.add_option("--checkpoint", o.checkpoint, "folder of steps");
  app.add_option("--checkpoint-every", o.checkpoint_every, "steps");
  app.add_flag("--resume", o.resume, "continue from the newest step, if there is one");
  app.add_option("--save-hf", o.save_hf, "folder for config.json and model.safetensors");
  app.add_flag("--plan", o.plan, "print what each rank would hold and send, and end");
  app.add_flag("--json", o.json, "print it as JSON");
  CLI11_PARSE(app, argc, argv);
  return comm::run_main([&] {
    const vit::Config config = o.config.empty() ? vit::Config{} : vit::read_config(o.config);
    if (o.plan) {
      plan(o, config);
    } else {
      train(o, config);
    }
  });
}
