// A few training steps of a small network with FSDP over dp and tensor parallel over tp, using the
// installed library alone. Fails unless the loss falls and is the one that a single rank computes.

#include <ATen/ops/mse_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/silu.h>

#include <cmath>
#include <cstdio>

#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/module.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/tensor_parallel/parallelize.h"

namespace {

using namespace tessera;

class Network : public nn::Module<Network> {
 public:
  Network() {
    up = register_module("up", std::make_shared<nn::Linear>(16, 64));
    down = register_module("down", std::make_shared<nn::Linear>(64, 16));
  }
  at::Tensor forward(const at::Tensor& x) { return (*down)(at::silu((*up)(x))); }

  std::shared_ptr<nn::Linear> up, down;
};

// The loss of every step, on this rank's view of the mesh.
std::vector<double> train(const DeviceMesh& mesh, int steps) {
  auto network = [] {
    nn::MetaDevice meta;
    return std::make_shared<Network>();
  }();
  tensor_parallel::parallelize_module(
      *network, mesh["tp"],
      {{"up", tensor_parallel::colwise_parallel()},
       // Plain, for the loss outside of forward.
       {"down", tensor_parallel::rowwise_parallel({.use_local_output = true})}});
  fsdp::fully_shard(*network, mesh["dp"]);
  nn::to_empty(*network, at::kCPU);
  nn::init_weights(*network, 7);

  optim::AdamW optimizer(*network, {.lr = 1e-2});
  const auto x = at::ones({8, 16});
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    const auto loss = at::mse_loss((*network)(x), x);
    loss.backward();
    optim::clip_grad_norm_(
        [&] {
          std::vector<nn::SlotPtr> slots;
          for (const auto& [name, slot] : network->named_slots()) {
            slots.push_back(slot);
          }
          return slots;
        }(),
        1.0);
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

bool agree(const std::vector<double>& a, const std::vector<double>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::abs(a[i] - b[i]) > 1e-4 * std::abs(b[i])) {
      return false;
    }
  }
  return true;
}

void run_rank() {
  const auto world = comm::world_from_environment();
  const std::int64_t tp = world->size() % 2 == 0 ? 2 : 1;
  const auto losses = train(init_device_mesh(world, {world->size() / tp, tp}, {"dp", "tp"}), 10);
  const auto alone =
      train(init_device_mesh(comm::thread_worlds(1).front(), {1, 1}, {"dp", "tp"}), 10);
  if (world->rank() == 0) {
    std::printf("loss %.6f -> %.6f on %d ranks, %.6f on one\n", losses.front(), losses.back(),
                world->size(), alone.back());
  }
  TESSERA_CHECK(losses.back() < losses.front() && agree(losses, alone), "the loss is wrong");
}

}  // namespace

int main() {
  return comm::run_main(&run_rank);
}
