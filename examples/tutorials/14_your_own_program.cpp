// Your own program: data that is no text, a schedule, an average of the weights, TensorBoard, a
// trace, a profile, and a finder of NaN. Argument: a folder for what it writes; without one, it
// writes nothing.
//   tessera-run --nproc 2 -- build/bin/tutorial_14_your_own_program out

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>

#include <filesystem>
#include <iostream>
#include <optional>

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
/// Points of a curve. A step is the same rows on every mesh; each rank reads its own of them.
class Points {
 public:
  struct Batch {
    at::Tensor x, y;
  };
  std::int64_t steps_per_epoch() const { return x_.size(0) / kBatch; }
  /// The rows of `rank` of `ranks`. Each epoch has an order of its own, the same on all ranks.
  Batch load(std::int64_t step, std::int64_t rank, std::int64_t ranks) const {
    TESSERA_CHECK(kBatch % ranks == 0, "a batch of ", kBatch, " rows can't be split over ", ranks,
                  " ranks; take a number that divides it");
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

// [finder]
/// Names the first module whose result is not finite, and by run_main the rank. For a search: the
/// host waits for each module.
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
// [finder]

void run_rank(const std::optional<std::filesystem::path>& out) {
  const comm::WorldPtr world = comm::world_from_environment();
  const DeviceMesh mesh = init_device_mesh(world, {world->size()}, {"dp"});
  const auto model = std::make_shared<Curve>();
  find_nan(*model);
  fsdp::fully_shard(*model, mesh);
  nn::init_weights(*model, /*seed=*/0);

  constexpr std::int64_t kSteps = 160;
  const Points points;
  const auto adamw =
      std::make_shared<optim::AdamW>(*model, optim::AdamWOptions{.lr = 2e-2, .weight_decay = 0});
  optim::Ema optimizer(adamw, /*decay=*/0.9);
  const optim::LrSchedule schedule(
      {.schedule = optim::Schedule::kCosine, .warmup = 10, .steps = kSteps});
  observe::MeanMetric mean;
  observe::ModuleWatch watch(*model);
  observe::StepTrace trace(world);
  watch.add(trace);
  std::optional<observe::TensorBoardWriter> board;
  if (out && world->rank() == 0) {
    board.emplace(*out / "board");
  }
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const observe::ModuleWatch::Scope scope(watch);
    const bool traced = step == 2;
    std::optional<observe::KernelProfile> profile;
    if (traced) {
      trace.begin_step(step);
      if (out && world->rank() == 0) {
        profile.emplace(at::kCPU);
      }
    }
    const Points::Batch batch = points.load(step, mesh.local_rank(), mesh.size());
    const at::Tensor loss = at::mse_loss((*model)(batch.x), batch.y);
    loss.backward();
    const at::Tensor norm = optim::clip_grad_norm_(optimizer.parameters(), 1.0);
    optimizer.scale_lr(schedule.factor(step));
    optimizer.step();
    optimizer.zero_grad();
    mean.update(loss.item<double>());
    if (traced) {
      trace.end_step();
      if (profile) {
        profile->write(*out / "profile.json");
      }
    }
    if ((step + 1) % 20 == 0) {
      mean.sync(*world);  // every rank has its part
      if (world->rank() == 0) {
        std::cout << "step " << step + 1 << " loss " << mean.compute() << "\n";
      }
      if (board) {
        board->write(step + 1, {{"loss", mean.compute()}, {"grad_norm", norm.item<double>()}});
      }
      mean.unsync();
      mean.reset();
    }
  }
  if (out) {
    trace.write(*out / "trace.json", "dp=" + std::to_string(mesh.local_rank()));
  }

  optimizer.swap();  // the averages are the weights, for evaluation or an export
  const Points::Batch batch = points.load(0, 0, 1);
  const double averaged = at::mse_loss((*model)(batch.x), batch.y).item<double>();
  optimizer.swap();
  if (world->rank() == 0) {
    std::cout << "of the average of the weights: loss " << averaged << std::endl;
  }
}

int main(int argc, char** argv) {
  return comm::run_main(
      [&] { run_rank(argc > 1 ? std::optional<std::filesystem::path>(argv[1]) : std::nullopt); });
}
