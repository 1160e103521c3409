// Trains an MLP of torch::nn modules with data parallelism (fsdp::replicate), for bench_ddp.py.
// Rank 0 prints one JSON object for each step.
//   tessera-run --nproc 2 -- build/bin/bench_ddp WIDTH LAYERS BATCH STEPS

#include <ATen/ops/arange.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/sin.h>
#include <fmt/format.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <cstdlib>

#include "tessera/tessera.hpp"

namespace {

using namespace tessera;

/// Returns values of a formula, not random values, so bench_ddp.py can compute the same bits.
at::Tensor waves(at::IntArrayRef sizes, double phase) {
  return at::sin(at::arange(c10::multiply_integers(sizes), at::kFloat).mul(0.7).add(phase))
      .view(sizes);
}

torch::nn::Sequential mlp(std::int64_t width, std::int64_t layers) {
  const at::NoGradGuard no_grad;
  torch::nn::Sequential stack;
  for (std::int64_t i = 0; i < layers; ++i) {
    const torch::nn::Linear layer(width, width);
    layer->weight.copy_(waves({width, width}, static_cast<double>(i)).mul(0.05));
    layer->bias.zero_();
    stack->push_back(torch::nn::ReLU());
    stack->push_back(layer);
  }
  return stack;
}

void run_rank(std::int64_t width, std::int64_t layers, std::int64_t batch, int steps) {
  const comm::WorldPtr world = comm::world_from_environment();
  const auto model = nn::adopt(mlp(width, layers));
  fsdp::replicate(*model, fsdp::world_mesh(world));
  optim::AdamW optimizer(*model, {.lr = 1e-4, .weight_decay = 0.1});
  keep_freed_memory();
  const at::Tensor x = waves({batch, width}, 100 + world->rank());
  const at::Tensor target = waves({batch, width}, 200 + world->rank());
  for (int step = 0; step < steps; ++step) {
    const auto begun = std::chrono::steady_clock::now();
    const at::Tensor loss = at::mse_loss((*model)(x), target);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun;
    if (world->rank() == 0) {
      fmt::print("{{\"step_time_s\": {}, \"loss\": {}}}\n", seconds.count(), loss.item<float>());
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return comm::run_main([&] {
    TESSERA_CHECK(argc == 5, "usage: bench_ddp WIDTH LAYERS BATCH STEPS");
    run_rank(std::atoll(argv[1]), std::atoll(argv[2]), std::atoll(argv[3]), std::atoi(argv[4]));
  });
}
