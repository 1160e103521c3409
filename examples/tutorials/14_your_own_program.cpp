// A complete training program: non-text data, a learning-rate schedule, averaged weights,
// TensorBoard, a profile, and a NaN finder. The argument is the output folder;
// without it, the program writes no files.
//   tessera-run --nproc 2 -- build/bin/tutorial_14_your_own_program out

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>

#include <filesystem>
#include <string>

#include "tessera/tessera.hpp"

using namespace tessera;

struct Curve : nn::Module<Curve> {
  Curve() {
    up = register_module("up", std::make_shared<nn::Linear>(1, 64));
    down = register_module("down", std::make_shared<nn::Linear>(64, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return (*down)(at::tanh((*up)(x))); }
  std::shared_ptr<nn::Linear> up, down;
};

// [data]
/// The data: points of a curve. A step has the same points on every mesh; each rank reads a part.
class Points {
 public:
  struct Batch {
    at::Tensor x, y;
  };
  std::int64_t steps_per_epoch() const { return x_.size(0) / kBatch; }
  /// Returns the points of `rank` among `ranks` data-parallel ranks. Each epoch has its own order,
  /// equal on all ranks.
  Batch load(std::int64_t step, std::int64_t rank, std::int64_t ranks) const {
    TESSERA_CHECK(kBatch % ranks == 0, "a batch of ", kBatch, " rows can't be split over ", ranks,
                  " ranks; start a number of ranks that divides ", kBatch);
    const auto order = at::randperm(
        x_.size(0), at::make_generator<at::CPUGeneratorImpl>(step / steps_per_epoch()), at::kLong);
    const std::int64_t rows = kBatch / ranks;
    const std::int64_t first = step % steps_per_epoch() * kBatch + rank * rows;
    const at::Tensor mine = order.slice(0, first, first + rows);
    return {x_.index_select(0, mine), y_.index_select(0, mine)};
  }

 private:
  static constexpr std::int64_t kBatch = 16;
  at::Tensor x_ = at::arange(256, at::kFloat).div(40).sub(3.2).unsqueeze(1);
  at::Tensor y_ = at::sin(2 * x_);
};
// [data]

/// Adds hooks that throw at the first module whose result has a NaN or infinite value. The message
/// names the module; run_main() adds the rank. For debugging only: the CPU waits for the device
/// after each module.
void find_nan(nn::ModuleBase& model) {
  nn::visit_modules(model, [](const std::string& fqn, nn::ModuleBase& module) {
    module.add_forward_hook([fqn](nn::ModuleBase& self, nn::TensorList results) {
      for (const at::Tensor* result : results) {
        TESSERA_CHECK(local_tensor(*result).isfinite().all().item<bool>(), "the result of '", fqn,
                      "', a ", self.name(), ", is not finite");
      }
    });
  });
}

/// The training program of one rank. `out` is the output folder; if "", no files are written.
void run_rank(const std::filesystem::path& out) {
  constexpr std::int64_t kSteps = 160;
  const auto file = [&out](const char* name) { return out.empty() ? out : out / name; };
  training::Recording recording({.profile = file("profile.json"), .steps = kSteps});
  const comm::WorldPtr world = comm::world_from_environment();
  const DeviceMesh mesh = init_device_mesh(world, {world->size()}, {"dp"});
  const auto model = std::make_shared<Curve>();
  find_nan(*model);
  fsdp::fully_shard(*model, mesh);
  nn::init_weights(*model, /*seed=*/0);

  const Points points;
  const optim::AdamWOptions adamw{.lr = 2e-2, .weight_decay = 0};
  optim::Ema optimizer(std::make_shared<optim::AdamW>(*model, adamw), /*decay=*/0.9);
  training::TrainState state{*model, optimizer};
  const training::StepOptions options{
      .schedule =
          optim::LrSchedule({.schedule = optim::Schedule::kCosine, .warmup = 10, .steps = kSteps})};
  training::StepMeter meter(world, "cpu");
  training::MetricLog log({.tensorboard = file("board"), .steps = kSteps, .log_every = 20}, world);
  log.open(/*done=*/0);
  recording.begin(*world, /*done=*/0);

  const auto step = [&] {
    meter.begin();
    const Points::Batch batch = points.load(state.step, mesh.local_rank(), mesh.size());
    meter.data_ready();
    const training::StepResult result = training::step(
        state, mesh, options,
        [&](std::int64_t /*i*/) { return at::mse_loss((*model)(batch.x), batch.y); });
    return meter.end(state, result, adamw.lr * result.lr_factor);
  };
  while (state.step < kSteps) {
    log.write(recording.run(state, step), /*tokens=*/0);
  }

  training::with_averaged_weights(optimizer, [&] {
    const Points::Batch batch = points.load(0, 0, 1);
    const auto averaged = at::mse_loss((*model)(batch.x), batch.y).item<double>();
    log.line("of the average of the weights: loss: " + std::to_string(averaged));
  });
}

int main(int argc, char** argv) {
  return comm::run_main([&] { run_rank(argc > 1 ? argv[1] : ""); });
}
