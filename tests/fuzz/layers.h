// The small modules of the models. What a class of the library does not offer is a module of the
// user's own.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "fuzz/case.h"
#include "tessera/nn/module.h"

namespace tessera::fuzz {

constexpr double kDropout = 0.25;

/// A module from a tensor to a tensor, whatever its class. Without a module: the identity.
struct Layer {
  std::shared_ptr<nn::ModuleBase> module;
  std::function<at::Tensor(const at::Tensor&)> call = [](const at::Tensor& x) { return x; };

  at::Tensor operator()(const at::Tensor& x) const { return call(x); }
};

template <class M>
Layer layer(std::shared_ptr<M> module) {
  return {module, [module](const at::Tensor& x) { return (*module)(x); }};
}

Layer norm_layer(NormKind kind, std::int64_t size);
Layer linear_layer(LinearKind kind, std::int64_t in, std::int64_t out, bool bias);
Layer dropout_layer(DropoutKind kind);
/// A Linear, with an adapter beside it or without.
Layer projection(LinearKind kind, std::int64_t in, std::int64_t out, bool bias, bool adapter);
Layer position_layer(std::int64_t dim);
/// A scale written for the local parts.
Layer part_scale_layer(PartScale kind, std::int64_t dim);

}  // namespace tessera::fuzz
