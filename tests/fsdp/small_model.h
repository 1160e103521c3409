#pragma once

#include <ATen/ops/arange.h>
#include <ATen/ops/silu.h>
#include <c10/core/GradMode.h>

#include <memory>
#include <vector>

#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/module.h"
#include "testing/ranks.h"

namespace tessera::testing {

/// Irregular values in (-scale, scale) that depend on the index and `seed` only.
inline at::Tensor wave(at::IntArrayRef sizes, double seed, double scale = 1.0) {
  const at::Tensor index = at::arange(c10::multiply_integers(sizes), at::kDouble);
  const at::Tensor hash = index.mul(12.9898).add(seed).sin().mul(43758.5453);
  return hash.sub(hash.floor()).mul(2 * scale).sub(scale).to(at::kFloat).view(sizes);
}

/// x + down(silu(up(x))).
class Block : public nn::Module<Block> {
 public:
  Block(std::int64_t dim, std::int64_t hidden) {
    up = register_module("up", std::make_shared<nn::Linear>(dim, hidden));
    down = register_module("down", std::make_shared<nn::Linear>(hidden, dim));
  }
  at::Tensor forward(const at::Tensor& x) { return x + (*down)(at::silu((*up)(x))); }

  std::shared_ptr<nn::Linear> up, down;
};

/// Blocks and a head: (rows, dim) -> (rows, classes).
class SmallModel : public nn::Module<SmallModel> {
 public:
  SmallModel(std::int64_t dim, std::int64_t hidden, std::int64_t classes, int depth = 3) {
    for (int i = 0; i < depth; ++i) {
      blocks.push_back(
          register_module("block" + std::to_string(i), std::make_shared<Block>(dim, hidden)));
    }
    head = register_module("head", std::make_shared<nn::Linear>(dim, classes));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : blocks) x = (*block)(x);
    return (*head)(x);
  }

  std::vector<std::shared_ptr<Block>> blocks;
  std::shared_ptr<nn::Linear> head;
};

/// The same values in every parameter, whatever its layout.
inline void fill(nn::ModuleBase& module) {
  const c10::AutoGradMode no_grad(false);
  double seed = 0;
  for (const auto& [name, slot] : module.named_slots()) {
    const at::Tensor& to = slot->persistent();
    const at::Tensor values = wave(to.sizes(), seed++, 0.3);
    if (tessera::is_distributed(to)) {
      const ShardingSpec& spec = sharding_spec(to);
      local_tensor(to).copy_(local_tensor(
          distribute_tensor(values, spec.mesh, to_placements(*spec.layout, to.sizes()))));
    } else {
      to.copy_(values);
    }
    slot->set_initialized(true);
  }
}

/// The whole value of a parameter, or of its gradient. Collective.
inline at::Tensor whole(const at::Tensor& tensor) {
  const c10::AutoGradMode no_grad(false);
  return tessera::is_distributed(tensor) ? DistributedTensor(tensor).full_tensor()
                                         : tensor.detach();
}

/// One step of gradient descent on the shards; drops the gradients.
inline void descend(nn::ModuleBase& module, double lr) {
  const c10::AutoGradMode no_grad(false);
  for (const auto& [name, slot] : module.named_slots()) {
    const at::Tensor& parameter = slot->persistent();
    if (parameter.grad().defined()) {
      local_tensor(parameter).sub_(local_tensor(parameter.grad()).mul(lr));
      parameter.mutable_grad().reset();
    }
  }
}

/// Mean of squares of the outputs for rows [first, first + rows) of the batch.
inline at::Tensor loss_of(SmallModel& model, const at::Tensor& batch, std::int64_t first,
                          std::int64_t rows) {
  return model(batch.narrow(0, first, rows)).square().mean();
}

}  // namespace tessera::testing
