#include "fuzz/layers.h"

#include <ATen/ops/dropout.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <vector>

#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/local_map.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/hooked.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/norm.h"

namespace tessera::fuzz {
namespace {

constexpr std::int64_t kRank = 2;     // of adapters
constexpr std::int64_t kLongest = 8;  // sequence

/// A norm of a user's own: the parameter is used directly, by an operator that broadcasts it.
class Scale : public nn::Module<Scale> {
 public:
  explicit Scale(std::int64_t size) { weight_ = register_slot("weight", {size}); }
  at::Tensor forward(const at::Tensor& x) { return x * *weight_; }

 private:
  nn::Parameter weight_;
};

/// The same, written for the local parts.
class PartScaleLayer : public nn::Module<PartScaleLayer> {
 public:
  PartScaleLayer(PartScale kind, std::int64_t size) : kind_(kind) {
    weight_ = register_slot("weight", {size});
  }
  at::Tensor forward(const at::Tensor& x) {
    if (!tessera::is_distributed(x)) {
      return x * *weight_;
    }
    return kind_ == PartScale::kLocalMap ? by_local_map(x) : by_from_local(x);
  }

 private:
  /// Without a word on gradients.
  at::Tensor by_local_map(const at::Tensor& x) const {
    const auto scale = [](const std::vector<at::Tensor>& parts) {
      return std::vector<at::Tensor>{parts[0] * parts[1]};
    };
    const DistributedTensor input(x);
    return local_map(scale, {x, *weight_}, input.mesh(), {input.placements()},
                     {.out_sizes = {x.sizes().vec()}})[0];
  }

  /// Where x is split, each rank makes a term of the weight's gradient.
  at::Tensor by_from_local(const at::Tensor& x) const {
    const DistributedTensor input(x);
    at::Tensor weight = *weight_;
    if (tessera::is_distributed(weight)) {
      const bool split = !input.layout()->is_replicated();
      weight = DistributedTensor(weight).to_local(split ? Placements{Partial{}}
                                                        : Placements{Replicate{}});
    }
    return DistributedTensor::from_local(input.to_local() * weight, input.spec(), x.sizes().vec());
  }

  PartScale kind_;
  nn::Parameter weight_;
};

class Position : public nn::Module<Position> {
 public:
  explicit Position(std::int64_t dim) { weight_ = register_slot("weight", {kLongest, dim}); }
  at::Tensor forward(const at::Tensor& x) { return x + weight_->narrow(0, 0, x.size(1)); }

 private:
  nn::Parameter weight_;
};

class FunctionDropout : public nn::Module<FunctionDropout> {
 public:
  at::Tensor forward(const at::Tensor& x) { return at::dropout(x, kDropout, is_training()); }
};

}  // namespace

Layer norm_layer(NormKind kind, std::int64_t size) {
  switch (kind) {
    case NormKind::kNone:
      return {};
    case NormKind::kRms:
      return layer(std::make_shared<nn::RMSNorm>(size));
    case NormKind::kLayer:
      return layer(std::make_shared<nn::LayerNorm>(size));
    case NormKind::kLayerWithoutBias:
      return layer(std::make_shared<nn::LayerNorm>(size, nn::LayerNormOptions{.bias = false}));
    case NormKind::kScale:
      return layer(std::make_shared<Scale>(size));
    case NormKind::kStockLayer:
      return layer(
          std::make_shared<nn::Hooked<torch::nn::LayerNorm>>(torch::nn::LayerNormOptions({size})));
  }
  return {};
}

Layer linear_layer(LinearKind kind, std::int64_t in, std::int64_t out, bool bias) {
  if (kind == LinearKind::kStock) {
    return layer(std::make_shared<nn::Hooked<torch::nn::Linear>>(
        torch::nn::LinearOptions(in, out).bias(bias)));
  }
  return layer(std::make_shared<nn::Linear>(in, out, nn::LinearOptions{.bias = bias}));
}

Layer dropout_layer(DropoutKind kind) {
  switch (kind) {
    case DropoutKind::kNone:
      return {};
    case DropoutKind::kModule:
      return layer(std::make_shared<nn::Dropout>(kDropout));
    case DropoutKind::kFunction:
      return layer(std::make_shared<FunctionDropout>());
    case DropoutKind::kStock:
      return layer(
          std::make_shared<nn::Hooked<torch::nn::Dropout>>(torch::nn::DropoutOptions(kDropout)));
  }
  return {};
}

namespace {

/// A Linear with a low-rank one beside it (Hu et al. 2021).
class Adapted : public nn::Module<Adapted> {
 public:
  Adapted(LinearKind kind, std::int64_t in, std::int64_t out, bool bias)
      : base_(linear_layer(kind, in, out, bias)),
        a_(linear_layer(LinearKind::kOwn, in, kRank, false)),
        b_(linear_layer(LinearKind::kOwn, kRank, out, false)) {
    register_module("base", base_.module);
    register_module("a", a_.module);
    register_module("b", b_.module);
  }
  at::Tensor forward(const at::Tensor& x) { return base_(x) + b_(a_(x)) * 0.5; }

 private:
  Layer base_, a_, b_;
};

}  // namespace

Layer projection(LinearKind kind, std::int64_t in, std::int64_t out, bool bias, bool adapter) {
  return adapter ? layer(std::make_shared<Adapted>(kind, in, out, bias))
                 : linear_layer(kind, in, out, bias);
}

Layer position_layer(std::int64_t dim) {
  return layer(std::make_shared<Position>(dim));
}

Layer part_scale_layer(PartScale kind, std::int64_t dim) {
  return layer(std::make_shared<PartScaleLayer>(kind, dim));
}

}  // namespace tessera::fuzz
