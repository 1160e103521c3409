// The modules of the fuzzed models, written as a user would write them.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fuzz/case.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"

namespace tessera::fuzz {

constexpr double kDropout = 0.25;

struct Layer {
  std::shared_ptr<nn::ModuleBase> module;
  std::function<at::Tensor(const at::Tensor&)> call = [](const at::Tensor& x) { return x; };

  at::Tensor operator()(const at::Tensor& x) const { return call(x); }
};

template <class M>
Layer layer(std::shared_ptr<M> module) {
  return {module, [module](const at::Tensor& x) { return (*module)(x); }};
}

/// Batch size and sequence length of this rank's input. They cannot be computed from a folded
/// model's activations, whose shape is (batch * sequence, features).
struct TokenSizes {
  std::int64_t batch = 0, sequence = 0;
};

class Attention : public nn::Module<Attention> {
 public:
  explicit Attention(const ModelSpec& spec);
  at::Tensor forward(const at::Tensor& x, const TokenSizes& sizes);

 private:
  std::vector<at::Tensor> project(const at::Tensor& x);
  at::Tensor mask(std::int64_t positions) const;
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);
  at::Tensor attend_by_hand(const at::Tensor& q, at::Tensor k, at::Tensor v);

  AttentionSpec spec_;
  std::int64_t heads_, head_dim_;
  bool folded_;
  Layer qkv_, q_, k_, v_, q_norm_, k_norm_, out_;
  nn::Parameter gain_;
};

class Mlp : public nn::Module<Mlp> {
 public:
  explicit Mlp(const ModelSpec& spec);
  /// Returns the output and, if MlpSpec::auxiliary_loss is set, the auxiliary loss summed over all
  /// tokens.
  std::vector<at::Tensor> forward(const at::Tensor& x);

 private:
  at::Tensor inner(const at::Tensor& x);
  at::Tensor activate(const at::Tensor& x);
  at::Tensor between(const at::Tensor& x) const;

  MlpSpec spec_;
  std::shared_ptr<nn::MixtureOfExperts> mixture_;
  nn::Parameter inner_bias_;
  Layer up_, gate_, fused_, middle_norm_, dropout_, down_;
};

class Block : public nn::Module<Block> {
 public:
  explicit Block(const ModelSpec& spec);
  /// Returns the output and, if the MLP has an auxiliary loss, the auxiliary loss.
  std::vector<at::Tensor> forward(const at::Tensor& x, const TokenSizes& sizes);

  /// Returns the block's attention module and MLP module. Some blocks have only one module.
  std::vector<nn::ModuleBase*> halves() const;

 private:
  at::Tensor scaled(const at::Tensor& x) const;
  std::vector<at::Tensor> feed(const at::Tensor& x);

  MlpSpec spec_;
  Layer norm1_, norm2_, dropout1_, dropout2_;
  std::shared_ptr<Attention> attention_;
  std::shared_ptr<Mlp> mlp_;
  nn::Parameter scale_;
};

/// A decoder, written for one rank. Maps token ids (batch, sequence) to logits and an auxiliary
/// loss (can be undefined). Logits: (batch, sequence, vocabulary), or (tokens, vocabulary) if
/// ModelSpec::folded. With `targets` (tokens), returns the sum of the losses, not logits.
class Net : public nn::Module<Net> {
 public:
  Net(const ModelSpec& spec, Loss loss);
  std::vector<at::Tensor> forward(const at::Tensor& tokens, const at::Tensor& targets);
  void reset_parameters(const nn::InitContext& init) override;

  const std::vector<std::shared_ptr<Block>>& blocks() const { return blocks_; }

 private:
  at::Tensor embedded(const at::Tensor& tokens);

  ModelSpec spec_;
  Loss loss_;
  Layer embed_, position_, dropout_, norm_;
  std::vector<std::shared_ptr<Block>> blocks_;
  std::shared_ptr<nn::Linear> head_;
};

/// Returns the sum of the losses of `targets` (tokens). `outputs`: the results of Net::forward()
/// without targets.
at::Tensor sum_of_losses(const std::vector<at::Tensor>& outputs, const at::Tensor& targets,
                         Loss loss);

}  // namespace tessera::fuzz
