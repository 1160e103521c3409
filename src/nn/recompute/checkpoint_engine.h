#pragma once

#include <torch/csrc/autograd/engine.h>

#include <memory>

#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::nn::detail {

/// libtorch's engine, with its own answers to two questions: with which hooks a tensor is kept, of
/// which libtorch has a stack, but one that holds Python objects only; and what the gradient of a
/// parameter is for which another tensor stands in.
class CheckpointEngine : public torch::autograd::Engine {
 public:
  CheckpointEngine() = default;
  ~CheckpointEngine() override { stop(); }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override;
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& gradients,
                                         bool keep_graph, bool create_graph, bool accumulate,
                                         const torch::autograd::edge_list& outputs) override;
};

}  // namespace tessera::nn::detail
TESSERA_API_FOR_TEST_END
