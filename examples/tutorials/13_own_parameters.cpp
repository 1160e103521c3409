// Parameters of container modules under sequence parallelism: class token, registers, positions and
// LayerScale of a patch encoder. The gradients are compared with those of one rank.
//   tessera-run --nproc 2 -- build/bin/tutorial_13_own_parameters

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>

#include <iostream>

#include "expect_gradients.h"
#include "tessera/tessera.hpp"

using namespace tessera;

constexpr std::int64_t kDim = 6, kPatches = 5, kRegisters = 2;

/// An MLP with a LayerScale (Touvron et al. 2021). The scale is a parameter of the block.
struct Block : nn::Module<Block> {
  Block() {
    norm = register_module("norm", std::make_shared<nn::LayerNorm>(kDim));
    up = register_module("up", std::make_shared<nn::Linear>(kDim, 4 * kDim));
    down = register_module("down", std::make_shared<nn::Linear>(4 * kDim, kDim));
    scale = register_slot("scale", {kDim});
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + *scale * (*down)(at::gelu((*up)((*norm)(x))));
  }
  void reset_parameters(const nn::InitContext& init) override {
    init.fill(scale, nn::init::constant(0.1));
  }
  std::shared_ptr<nn::LayerNorm> norm;
  std::shared_ptr<nn::Linear> up, down;
  nn::Parameter scale;
};

/// Maps patches of sizes (patches, dim) to a loss. A class token and registers are prepended to the
/// patches.
struct Encoder : nn::Module<Encoder> {
  Encoder() {
    token = register_slot("token", {1, kDim});
    registers = register_slot("registers", {kRegisters, kDim});
    positions = register_slot("positions", {1 + kRegisters + kPatches, kDim});
    blocks = register_module("blocks", std::make_shared<nn::ModuleList>());
    blocks->push_back(std::make_shared<Block>());
    blocks->push_back(std::make_shared<Block>());
  }
  at::Tensor forward(const at::Tensor& patches) {
    at::Tensor x = at::cat({*token, *registers, patches}) + *positions;
    for (std::size_t i = 0; i < blocks->size(); ++i) {
      x = (*blocks->at<Block>(i))(x);
    }
    return x[0].square().sum() + x.slice(0, 1 + kRegisters).square().mean();
  }
  void reset_parameters(const nn::InitContext& init) override {
    init.fill(*this, {{"token", nn::init::normal(0, 0.5)},
                      {"registers", nn::init::normal(0, 0.5)},
                      {"positions", nn::init::normal(0, 0.5)}});
  }
  nn::Parameter token, registers, positions;
  std::shared_ptr<nn::ModuleList> blocks;
};

// [plan]
tensor_parallel::ParallelizePlan plan() {
  using namespace tensor_parallel;
  return {
      {"blocks.*.norm", sequence_parallel({.sequence_dim = 0})},
      {"blocks.*.up", colwise_parallel()},
      {"blocks.*.down", rowwise_parallel({.output_layouts = Shard{0}})},
      // The pattern "" means the encoder itself, whose positions are split along the sequence. The
      // parameters that no entry names are replicated: the token, the registers and the blocks'
      // scales.
      {"", place_parameters({{"positions", Shard{0}}})},
  };
}
// [plan]

void run_rank() {
  const comm::WorldPtr world = comm::world_from_environment();
  const DeviceMesh mesh = init_device_mesh(world, {world->size()}, {"tp"});
  Encoder whole, split;
  nn::init_weights(whole, /*seed=*/0);
  nn::init_weights(split, /*seed=*/0);
  tensor_parallel::parallelize_module(split, mesh, plan());

  const at::Tensor patches = at::arange(kPatches * kDim, at::kFloat).view({kPatches, kDim}) / 30;
  whole(patches).backward();
  split(patches).backward();
  expect_gradients(split, whole);
  if (world->rank() == 0) {
    std::cout << "every gradient is as one rank computes it" << std::endl;
  }
}

int main() {
  return comm::run_main(&run_rank);
}
