// Trains a vision transformer on a mesh of FSDP x tensor parallelism with sequence parallelism.
//   tessera-run --nproc 4 -- build/bin/vit_train --dp 2 --tp 2 --metrics m.jsonl --save-hf model
//   vit_train --dp 64 --tp 4 --batch 4096 --plan --gpu h100

#include <iostream>

#include "examples/vit/options.h"
#include "examples/vit/stripes.h"
#include "examples/vit/vit.h"
#include "tessera/kernels/products.h"

using namespace tessera;
using vit::Options;

/// The model, its optimizer and a step, on one rank of the mesh.
struct Run {
  Run(const Options& o, const comm::WorldPtr& world) : o(o), world(world) {}

  /// Runs the next step on this rank's rows of the batch.
  observe::StepMetrics step() {
    const StrictScope strict;  // implicit communication outside of parallel styles and FSDP throws
                               // Error
    meter.begin();
    const vit::Images images =
        vit::stripes(o.config, state.step, o.batch, mesh.local_rank("dp"), o.dp);
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
  observe::count_tensor_memory();  // metrics then include peak memory, for comparison with a plan
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
  // The sizes of a rank: its rows of the batch, and its tokens of each row.
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
    if (const std::optional<Options> options = vit::parse(argc, argv)) {
      (options->plan ? plan : train)(*options);
    }
  });
}
