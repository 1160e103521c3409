// Small models for tests. Each model has sizes not divisible by 3, so 3 ranks get uneven shards.

#pragma once

#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/tanh.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include <array>
#include <memory>
#include <vector>

#include "tessera/nn/hooked.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"

// Models made of libtorch modules.
namespace tessera::testing {

/// Maps (rows, 5) to (rows, 3).
struct TorchMlp : torch::nn::Module {
  TorchMlp() {
    up = register_module("up", torch::nn::Linear(5, 7));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({7})));
    down = register_module("down", torch::nn::Linear(7, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return down(at::tanh(norm(up->forward(x)))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};

/// Maps an input of shape (rows, 2, 6, 6) to an output of shape (rows, 3).
struct TorchConvNet : torch::nn::Module {
  TorchConvNet()
      : first(register_module("first",
                              torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 5, 3).padding(1)))),
        second(register_module("second",
                               torch::nn::Conv2d(torch::nn::Conv2dOptions(5, 4, 3).stride(2)))),
        head(register_module("head", torch::nn::Linear(16, 3))) {}
  at::Tensor forward(const at::Tensor& x) {
    return head(at::relu(second(at::relu(first(x)))).flatten(1));
  }
  torch::nn::Conv2d first, second;
  torch::nn::Linear head;
};

/// Maps (rows, 5) to (rows, 3).
inline torch::nn::Sequential torch_sequential() {
  return torch::nn::Sequential(torch::nn::Linear(5, 7), torch::nn::Tanh(), torch::nn::Linear(7, 3));
}

/// Maps an input of shape (tokens, rows, 8) to an output of the same shape.
inline torch::nn::TransformerEncoder torch_encoder() {
  const torch::nn::TransformerEncoderLayer layer(
      torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(10).dropout(0));
  return torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(layer, 2));
}

/// A model with the buffer `shift` and batch norm's buffers (running statistics).
struct TorchWithBuffers : torch::nn::Module {
  TorchWithBuffers() {
    norm = register_module("norm", torch::nn::BatchNorm1d(5));
    fc = register_module("fc", torch::nn::Linear(5, 3));
    shift = register_buffer("shift", at::full({3}, 2.0));
  }
  at::Tensor forward(const at::Tensor& x) { return fc(norm(x)) + shift; }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear fc{nullptr};
  at::Tensor shift;
};

/// A module whose forward reads the module's own parameter, not only child modules.
struct TorchScale : torch::nn::Module {
  explicit TorchScale(std::int64_t size)
      : scale(register_parameter("scale", at::full({size}, 0.5))) {}
  at::Tensor forward(const at::Tensor& x) { return x * scale; }
  at::Tensor scale;
};

struct TorchScaled : torch::nn::Module {
  TorchScaled() {
    fc = register_module("fc", torch::nn::Linear(5, 3));
    gain = register_module("gain", std::make_shared<TorchScale>(3));
  }
  at::Tensor forward(const at::Tensor& x) { return gain->forward(fc(x)); }
  torch::nn::Linear fc{nullptr};
  std::shared_ptr<TorchScale> gain;
};

}  // namespace tessera::testing

/// TorchScale's forward reads a parameter directly, so nn::adopt() needs this list of parameters.
template <>
inline constexpr std::array tessera::nn::kSlotMembers<tessera::testing::TorchScale>{
    tessera::nn::SlotMember<tessera::testing::TorchScale>{"scale",
                                                          &tessera::testing::TorchScale::scale}};

namespace tessera::testing {

/// A model with an embedding, a ModuleList of Linears, a norm, an output layer and a buffer.
struct LayersOfEachKind : nn::Module<LayersOfEachKind> {
  LayersOfEachKind() {
    for (int i = 0; i < 2; ++i) {
      layers->push_back(std::make_shared<nn::Linear>(6, 6));
    }
    table = register_buffer_slot("table", {4}, /*persistent=*/false);
  }

  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = (*embed)(tokens);
    for (std::size_t i = 0; i < layers->size(); ++i) {
      x = (*layers->at<nn::Linear>(i))(x);
    }
    return (*out)((*norm)(x));
  }

  void reset_parameters(const nn::InitContext& init) override {
    init.fill(out->weight, nn::init::constant(0.25));
    init.fill(*this, {{"layers.*.bias", nn::init::constant(3.0)}});
    init.set_buffer(table, at::arange(4, at::kFloat));
  }

  nn::Child<nn::Embedding> embed{*this, "embed", 7, 6};
  nn::Child<nn::ModuleList> layers{*this, "layers"};
  nn::Child<nn::RMSNorm> norm{*this, "norm", 6};
  nn::Child<nn::Linear> out{*this, "out", 6, 5, nn::LinearOptions{.bias = false}};
  nn::Parameter table;
};

}  // namespace tessera::testing
