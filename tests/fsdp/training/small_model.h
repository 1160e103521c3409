#pragma once

#include <c10/core/GradMode.h>

#include <initializer_list>

#include "tessera/nn/child.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/module.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::testing {

/// Elements of a flat buffer of fp32 with shards of so many elements, each from a multiple of 64
/// bytes on.
constexpr std::int64_t packed_numel(std::initializer_list<std::int64_t> shards) {
  constexpr std::int64_t kUnit = 16;
  std::int64_t numel = 0;
  for (const std::int64_t shard : shards) {
    numel += (shard + kUnit - 1) / kUnit * kUnit;
  }
  return numel;
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
    for (const auto& block : blocks) {
      x = (*block)(x);
    }
    return (*head)(x);
  }

  std::vector<std::shared_ptr<Block>> blocks;
  std::shared_ptr<nn::Linear> head;
};

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
