#include "engine.h"

#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <mutex>

#include "region.h"
#include "tessera/core/error.h"

namespace tessera::nn::detail {
namespace {

using torch::autograd::Engine;

/// libtorch's engine, but for the one question for which its own stack of hooks takes Python
/// objects only.
class CheckpointEngine final : public Engine {
 public:
  CheckpointEngine() = default;
  ~CheckpointEngine() override { stop(); }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return hooks_of_innermost_region();
  }

  static Engine& instance() {
    static CheckpointEngine engine;
    return engine;
  }
};

}  // namespace

void install_engine() {
  static std::once_flag once;
  std::call_once(once, [] {
    TESSERA_CHECK(&Engine::get_default_engine() == &Engine::get_base_engine(),
                  "activation checkpointing needs an autograd engine of its own, but this process "
                  "has replaced libtorch's already (Python does); checkpoint there instead");
    torch::autograd::set_default_engine_stub(&CheckpointEngine::instance);
  });
}

}  // namespace tessera::nn::detail
