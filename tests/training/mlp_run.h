#pragma once

// A small model with sizes that no mesh divides, its rows and its training run.
#include <ATen/ops/cat.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/tanh.h>

#include <memory>
#include <utility>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/linear.h"
#include "tessera/optim/adamw.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "tessera/tensor_parallel/styles.h"
#include "tessera/training/step.h"
#include "testing/ranks.h"
#include "testing/values.h"

namespace tessera::testing {

struct Mlp : nn::Module<Mlp> {
  /// Returns the mean over rows and columns.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) {
    return at::mse_loss((*down)(at::tanh((*up)(x))), y);
  }
  nn::Child<nn::Linear> up{*this, "up", 7, 11}, down{*this, "down", 11, 3};
};

/// The rows of a step, of all ranks together.
constexpr std::int64_t kBatch = 12;

/// Rows [first, first + count) of a step: (x, y).
inline std::pair<at::Tensor, at::Tensor> rows_of(std::int64_t step, std::int64_t first,
                                                 std::int64_t count) {
  const at::Tensor x = uniform_values({kBatch, 7}, 100.0 + static_cast<double>(step));
  const at::Tensor y = uniform_values({kBatch, 3}, 200.0 + static_cast<double>(step));
  return {x.slice(0, first, first + count), y.slice(0, first, first + count)};
}

/// An Mlp on a mesh ("dp", "tp"), with its optimizer and state.
class MlpRun {
 public:
  MlpRun(const Rank& rank, std::int64_t dp, std::int64_t tp, const fsdp::Options& options = {})
      : mesh(rank.mesh({dp, tp}, {"dp", "tp"})), model(std::make_shared<Mlp>()) {
    if (tp > 1) {
      tensor_parallel::parallelize_module(*model, mesh["tp"],
                                          {{"up", tensor_parallel::colwise_parallel()},
                                           {"down", tensor_parallel::rowwise_parallel()}});
    }
    fsdp::fully_shard(*model, mesh["dp"], options);
    nn::init_weights(*model, /*seed=*/3);
    optimizer = std::make_unique<optim::AdamW>(*model, optim::AdamWOptions{.lr = 1e-2});
    state = std::make_unique<training::TrainState>(
        training::TrainState{.model = *model, .optimizer = *optimizer});
  }

  /// The loss of this rank's part of a micro-batch of the next step.
  at::Tensor loss(std::int64_t i, std::int64_t micro_batches = 1) {
    const std::int64_t own = kBatch / mesh.size("dp");
    const std::int64_t count = own / micro_batches;
    const auto [x, y] = rows_of(state->step, mesh.local_rank("dp") * own + i * count, count);
    return (*model)(x, y);
  }
  training::StepResult step(training::StepOptions options = {}) {
    options.batch = kBatch;
    return training::step(*state, mesh["dp"], options,
                          [&](std::int64_t i) { return loss(i, options.accumulate); });
  }
  /// All parameters in one vector, whole. Collective.
  at::Tensor weights() const {
    std::vector<at::Tensor> all;
    for (const auto& [name, slot] : model->named_slots()) {
      all.push_back(full_tensor(slot->persistent()).detach().flatten().clone());
    }
    return at::cat(all);
  }

  DeviceMesh mesh;
  std::shared_ptr<Mlp> model;
  std::unique_ptr<optim::AdamW> optimizer;
  std::unique_ptr<training::TrainState> state;
};

}  // namespace tessera::testing
