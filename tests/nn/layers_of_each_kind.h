#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <vector>

#include "tessera/nn/containers.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/norm.h"

namespace tessera::testing {

/// One of each kind: parameters by default, by the parent, by a table; a buffer.
class LayersOfEachKind : public nn::Module<LayersOfEachKind> {
 public:
  LayersOfEachKind() {
    embed = register_module("embed", std::make_shared<nn::Embedding>(7, 6));
    layers = register_module("layers", std::make_shared<nn::ModuleList>());
    for (int i = 0; i < 2; ++i) {
      layers->push_back(std::make_shared<nn::Linear>(6, 6));
    }
    norm = register_module("norm", std::make_shared<nn::RMSNorm>(6));
    out = register_module("out",
                          std::make_shared<nn::Linear>(6, 5, nn::LinearOptions{.bias = false}));
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

  std::shared_ptr<nn::Embedding> embed;
  std::shared_ptr<nn::ModuleList> layers;
  std::shared_ptr<nn::RMSNorm> norm;
  std::shared_ptr<nn::Linear> out;
  nn::Parameter table;
};

}  // namespace tessera::testing
