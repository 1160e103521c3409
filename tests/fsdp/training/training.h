#pragma once

// A small model trained by several ranks, held against one rank that trains with the whole batch.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "small_model.h"
#include "tessera/fsdp/fully_shard.h"

namespace tessera::testing {

constexpr std::int64_t kRows = 12;  // of the global batch; divides by 1, 2, 3, 4 and 6

/// The model's sizes, unless a test says otherwise: 2, 3 and 4 ranks divide none or some of them.
constexpr std::int64_t kDim = 7, kHidden = 10, kClasses = 3;

struct Sizes {
  std::int64_t dim = kDim, hidden = kHidden, classes = kClasses;
};

inline at::Tensor batch(std::int64_t dim, int step) {
  return uniform_values({kRows, dim}, 100 + step);
}

/// Loss of this rank's rows of a batch.
inline at::Tensor local_loss(SmallModel& model, const Rank& rank, int step = 0) {
  const std::int64_t rows = kRows / rank.size();
  return loss_of(model, batch(model.head->in_features(), step), rank.rank() * rows, rows);
}

/// Blocks first, the root last.
inline void shard(SmallModel& model, const DeviceMesh& mesh, const fsdp::Options& options = {}) {
  for (const auto& block : model.blocks) {
    fsdp::fully_shard(*block, mesh, options);
  }
  fsdp::Options root = options;
  root.post_forward_mesh_size = 1;
  fsdp::fully_shard(model, mesh, root);
}

/// A filled model, sharded over `mesh`.
struct ShardedModel : SmallModel {
  explicit ShardedModel(const DeviceMesh& mesh, const fsdp::Options& options = {},
                        const Sizes& sizes = {})
      : SmallModel(sizes.dim, sizes.hidden, sizes.classes) {
    fill(*this);
    shard(*this, mesh, options);
  }
};

/// Runs `body` on `ranks` ranks, with a model that is sharded over all of them.
inline void RunSharded(int ranks, const std::function<void(Rank&, ShardedModel&)>& body) {
  RunOnMesh({ranks}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    ShardedModel model(mesh);
    body(rank, model);
  });
}

/// A mesh and how a model lies on it: a case of a parametrized test.
struct Arrangement {
  const char* name;
  std::vector<std::int64_t> sizes;
  std::vector<std::string> names;
  fsdp::Options options{};
};

struct Training {
  std::vector<double> losses;
  std::vector<at::Tensor> gradients;  ///< of the last step
  std::vector<at::Tensor> parameters;
};

/// Gradient descent on one rank.
inline Training train_alone(const Sizes& sizes, int steps) {
  Filled<SmallModel> model(sizes.dim, sizes.hidden, sizes.classes);
  Training training;
  for (int step = 0; step < steps; ++step) {
    const at::Tensor loss = loss_of(model, batch(sizes.dim, step), 0, kRows);
    loss.backward();
    training.losses.push_back(loss.item<double>());
    training.gradients = gradients_of(model);
    descend(model, 0.1);
  }
  for (const auto& [name, slot] : model.named_slots()) {
    training.parameters.push_back(slot->get().detach());
  }
  return training;
}

/// The gradients of the sum of the losses of these steps, on one rank.
inline std::vector<at::Tensor> gradients_alone(const Sizes& sizes = {},
                                               const std::vector<int>& steps = {0}) {
  Filled<SmallModel> alone(sizes.dim, sizes.hidden, sizes.classes);
  for (const int step : steps) {
    loss_of(alone, batch(sizes.dim, step), 0, kRows).backward();
  }
  return gradients_of(alone);
}

/// The whole gradients, which the parameters then have no longer. Collective.
inline std::vector<at::Tensor> take_gradients(const nn::ModuleBase& model) {
  std::vector<at::Tensor> gradients;
  for (const auto& [name, slot] : model.named_slots()) {
    gradients.push_back(full_tensor(slot->persistent().grad()).clone());
    slot->persistent().mutable_grad().reset();
  }
  return gradients;
}

/// Trains a model that has been sharded over all ranks, and expects what one rank does.
inline void expect_training(SmallModel& model, const Rank& rank, const Training& expected) {
  const DeviceMesh all = rank.mesh({rank.size()}, {"all"});
  for (std::size_t step = 0; step < expected.losses.size(); ++step) {
    const at::Tensor loss = local_loss(model, rank, static_cast<int>(step));
    loss.backward();
    const at::Tensor sum = loss.detach().clone();
    all.group().all_reduce(sum, ReduceOp::kSum)->wait();
    EXPECT_NEAR(sum.item<double>() / rank.size(), expected.losses[step], 1e-5);
    if (step + 1 == expected.losses.size()) {
      expect_gradients(model, expected.gradients);
    }
    descend(model, 0.1);
  }
  std::size_t i = 0;
  for (const auto& [name, slot] : model.named_slots()) {
    const at::Tensor difference = full_tensor(slot->persistent()).sub(expected.parameters[i++]);
    EXPECT_LT(difference.abs().max().item<double>(), 1e-6) << name;
  }
}

inline comm::Traffic traffic_of(const comm::TrafficTable& traffic, const std::string& group,
                                const std::string& collective) {
  const auto found = traffic.find({group, collective});
  return found == traffic.end() ? comm::Traffic{} : found->second;
}

}  // namespace tessera::testing

namespace tessera::fsdp {

// What most tests of FSDP use.
using testing::Arrangement;
using testing::expect_gradients;
using testing::Filled;
using testing::full_tensor;
using testing::gradients_alone;
using testing::kClasses;
using testing::kDim;
using testing::kHidden;
using testing::local_loss;
using testing::RunSharded;
using testing::shard;
using testing::ShardedModel;
using testing::SmallModel;
using testing::take_gradients;
using testing::traffic_of;

}  // namespace tessera::fsdp
