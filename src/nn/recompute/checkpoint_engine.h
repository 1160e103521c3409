#pragma once

#include <torch/csrc/autograd/engine.h>

#include <memory>

namespace tessera::nn::detail {

/// libtorch's engine, with its own answer to one question: with which hooks a tensor is kept.
/// libtorch has a stack of such hooks, but it holds Python objects only.
class CheckpointEngine : public torch::autograd::Engine {
 public:
  CheckpointEngine() = default;
  ~CheckpointEngine() override { stop(); }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override;
};

}  // namespace tessera::nn::detail
