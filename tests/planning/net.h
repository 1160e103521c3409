// A small convolutional network and its training, for comparisons of planned and real steps.
#pragma once

#include <ATen/ops/conv2d.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/relu.h>

#include <memory>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/optimizer.h"
#include "tessera/planning/plan.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/module_values.h"

namespace tessera::testing {

/// Maps (batch, 3, height, width) to (batch, out, height, width).
struct Conv : nn::Module<Conv> {
  explicit Conv(std::int64_t out) {
    weight = register_slot("weight", {out, 3, 3, 3});
    bias = register_slot("bias", {out});
  }
  at::Tensor forward(const at::Tensor& x) { return at::conv2d(x, *weight, *bias, 1, 1); }
  void reset_parameters(const nn::InitContext& init) override {
    init.fill(*this, {{"weight", nn::init::normal(0, 0.1)}, {"bias", nn::init::constant(0)}});
  }
  nn::Parameter weight, bias;
};

struct Layer : nn::Module<Layer> {
  Layer(std::int64_t features, std::int64_t hidden)
      : up(*this, "up", features, hidden), down(*this, "down", hidden, features) {}
  at::Tensor forward(const at::Tensor& x) { return x + (*down)(at::relu((*up)(x))); }
  nn::Child<nn::Linear> up, down;
};

/// A model in which only the batch size is divisible by the number of ranks.
struct Net : nn::Module<Net> {
  static constexpr std::int64_t kChannels = 5, kSize = 7, kHidden = 333;
  static constexpr std::int64_t kFeatures = kChannels * kSize * kSize;

  explicit Net(std::int64_t depth) {
    for (std::int64_t i = 0; i < depth; ++i) {
      layers->push_back(std::make_shared<Layer>(kFeatures, kHidden));
    }
  }
  at::Tensor forward(const at::Tensor& images, const at::Tensor& targets) {
    const at::Tensor features = (*layers)((*norm)(at::relu((*conv)(images)).flatten(1)));
    return at::mse_loss((*down)(at::relu((*up)(features))), targets);
  }
  nn::Child<Conv> conv{*this, "conv", kChannels};
  nn::Child<nn::LayerNorm> norm{*this, "norm", kFeatures};
  nn::Child<nn::Sequential> layers{*this, "layers"};
  nn::Child<nn::Linear> up{*this, "up", kFeatures, kHidden};
  nn::Child<nn::Linear> down{*this, "down", kHidden, 3};
};

/// Makes a Net with `depth` layers on the meta device. Applies tensor parallelism over mesh
/// dimension "tp" and FSDP over "dp".
inline std::shared_ptr<Net> make_deep_net(const DeviceMesh& mesh, std::int64_t depth,
                                          const fsdp::Options& options = {}) {
  const auto net = testing::made_on_meta<Net>(depth);
  using namespace tensor_parallel;
  parallelize_module(*net, mesh["tp"],
                     {{"**.up", colwise_parallel()}, {"**.down", rowwise_parallel()}});
  fsdp::fully_shard({&*net->up, &*net->down}, mesh["dp"], options);
  nn::visit_modules(*net, [&](const std::string&, nn::ModuleBase& module) {
    if (dynamic_cast<Layer*>(&module) != nullptr) {
      fsdp::fully_shard(module, mesh["dp"], options);
    }
  });
  fsdp::fully_shard(*net, mesh["dp"], options);
  return net;
}

inline std::shared_ptr<Net> make_net(const DeviceMesh& mesh) {
  return make_deep_net(mesh, /*depth=*/0);
}

/// Returns a machine with 1e9 FLOPs per second for matrix products. All else takes no time.
inline planning::Machine products_alone() {
  return {.name = "m",
          .memory_bytes = 1e15,
          .flops_half = 1e9,
          .flops_fp32 = 1e9,
          .product_share = 1,
          .memory_bandwidth = 1e30,
          .operator_latency_s = 0,
          .link_bandwidth = 1e30,
          .network_bandwidth = 1e30,
          .network_share = 1,
          .link_latency_s = 0,
          .network_latency_s = 0};
}

/// Trains a step with `samples` samples. Ranks of a tp group get equal samples.
inline void train_on(Net& net, optim::Optimizer& optimizer, const DeviceMesh& mesh,
                     std::int64_t samples) {
  const double value = 0.1 * static_cast<double>(1 + mesh.local_rank("dp"));
  const at::Tensor images = at::full({samples, 3, Net::kSize, Net::kSize}, value);
  net(images, images.flatten(1).slice(1, 0, 3)).backward();
  optim::clip_grad_norm_(optimizer.parameters(), 1.0);
  optimizer.step();
  optimizer.zero_grad();
}

inline constexpr std::int64_t kSamples = 16;

inline void train_net(Net& net, optim::Optimizer& optimizer, const DeviceMesh& mesh) {
  train_on(net, optimizer, mesh, kSamples);
}

}  // namespace tessera::testing
