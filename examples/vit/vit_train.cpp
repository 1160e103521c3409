// Trains a vision transformer on a mesh of FSDP x tensor parallelism with sequence parallelism.
//   tessera-run --nproc 4 -- build/bin/vit_train --dp 2 --tp 2 --metrics m.jsonl --save-hf model
//   vit_train --dp 64 --tp 4 --batch 4096 --plan

#include <CLI/CLI.hpp>
#include <chrono>

#include "examples/vit/print_plan.h"
#include "examples/vit/stripes.h"
#include "examples/vit/vit.h"

using namespace tessera;

struct Options {
  std::string config, metrics, checkpoint, save_hf;
  std::int64_t steps = 100, batch = 64, dp = 1, tp = 1, checkpoint_every = 50;
  double lr = 1e-3;
  bool resume = false, plan = false;
};

/// The model, its optimizer and a step, on one rank of the mesh.
struct Run {
  Run(const Options& o, const vit::Config& c, const comm::WorldPtr& world, vit::Recording* r = {})
      : o(o),
        mesh(init_device_mesh(world, {o.dp, o.tp}, {"dp", "tp"})),
        model(vit::make_model(c, mesh, /*seed=*/0, r)),
        optimizer(*model, {.lr = o.lr, .weight_decay = 0.05}) {}

  /// Step `n`, from 0, on this rank's rows of the batch.
  observe::StepMetrics step(std::int64_t n) {
    const StrictScope strict;  // refuses what the plan does not say
    const auto start = std::chrono::steady_clock::now();
    const comm::TrafficTable before = mesh.world()->traffic().table();
    const vit::Images images = vit::stripes(model->config, n, o.batch, mesh.local_rank("dp"), o.dp);
    // `over`: ranks may have differently many rows.
    const at::Tensor loss = tensor_parallel::cross_entropy((*model)(images.pixels), images.labels,
                                                           {.over = mesh["dp"]});
    loss.backward();
    const at::Tensor norm = optim::clip_grad_norm_(optimizer.parameters(), /*max_norm=*/1.0);
    optimizer.scale_lr(schedule.factor(n));
    optimizer.step();
    optimizer.zero_grad();
    observe::StepMetrics metrics;
    metrics.step = n + 1;
    metrics.loss = training::mean_over(loss.detach(), mesh["dp"]).item<double>();
    metrics.grad_norm = norm.item<double>();
    metrics.lr = o.lr * schedule.factor(n);
    metrics.step_time_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    observe::set_memory(metrics, mesh.device_type());
    metrics.comm = mesh.world()->traffic().since(before);
    return metrics;
  }

  Options o;
  DeviceMesh mesh;
  std::shared_ptr<vit::VisionTransformer> model;
  optim::AdamW optimizer;
  optim::LrSchedule schedule{{optim::Schedule::kCosine, /*warmup=*/10, o.steps}};
};

void train(const Options& o, const vit::Config& config) {
  observe::count_tensor_memory();  // for the metrics, to hold a plan against
  const comm::WorldPtr world = comm::world_from_environment();
  Run run(o, config, world);
  const auto state = [&]() -> checkpoint::StateDict {
    return {*run.model, optim::named_state(run.optimizer, *run.model), {{"config", config}}};
  };
  const std::optional<std::int64_t> newest =
      o.checkpoint.empty() ? std::nullopt : checkpoint::newest_step(*world, o.checkpoint);
  TESSERA_CHECK(!newest || o.resume, o.checkpoint, " has a run; give --resume, or another folder");
  if (newest) {
    const nlohmann::json saved = checkpoint::load(*world, o.checkpoint, state()).entries;
    TESSERA_CHECK(saved == state().entries, o.checkpoint, " is of another model, ", saved.dump());
  }
  std::optional<observe::MetricsWriter> writer;
  if (world->rank() == 0 && !o.metrics.empty()) {
    writer.emplace(o.metrics, newest.value_or(0));
  }
  for (std::int64_t n = newest.value_or(0); n < o.steps; ++n) {
    const observe::StepMetrics metrics = run.step(n);
    if (world->rank() == 0) {
      std::cout << "step " << metrics.step << " loss " << metrics.loss << std::endl;
    }
    if (writer) {
      writer->write(metrics);
    }
    if (!o.checkpoint.empty() && (n + 1 == o.steps || (n + 1) % o.checkpoint_every == 0)) {
      checkpoint::save(*world, o.checkpoint, n + 1, state(), {.keep = 2});
    }
  }
  if (!o.save_hf.empty()) {
    checkpoint::save_hugging_face(*run.model, *world, o.save_hf, nlohmann::json(config).dump(2));
  }
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
  app.add_flag("--resume", o.resume, "go on from the newest step, if there is one");
  app.add_option("--save-hf", o.save_hf, "folder for config.json and model.safetensors");
  app.add_flag("--plan", o.plan, "print what a rank would hold and send, and end");
  CLI11_PARSE(app, argc, argv);
  return comm::run_main([&] {
    const vit::Config config = o.config.empty() ? vit::Config{} : vit::read_config(o.config);
    const auto make = [&](const comm::WorldPtr& world, vit::Recording& recording) {
      return std::make_unique<Run>(o, config, world, &recording);
    };
    o.plan ? vit::print_plan(static_cast<int>(o.dp * o.tp), make) : train(o, config);
  });
}
