// Autograd's engine with two functions of this library. One chooses the hooks for a tensor that is
// saved for backward: libtorch's stack of saved-tensor hooks accepts only Python objects, and in
// C++ libtorch calls the engine instead. The other finds the gradient of a parameter for which the
// graph contains another tensor.
//
// set_default_engine_stub, which libtorch uses for Python's engine, replaces the process's engine.
// Up to 2.12 graphs are owned by shared_ptr, from 2.13 by intrusive_ptr; this header does not
// depend on it.
//
// Canary: EngineCanary.
#pragma once

#include <torch/csrc/autograd/engine.h>

#include <functional>
#include <memory>

#include "tessera/export.h"
#include "tessera/internals/detail/graph.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// A call of libtorch's engine: what to compute (see torch::autograd::Engine::execute).
struct BackwardCall {
  edge_list roots;
  variable_list gradients;
  bool keep_graph = false;
  bool create_graph = false;
  /// whether gradients are added to the `.grad` of `outputs`; if false, the gradients are returned
  bool accumulate = false;
  /// Edges whose gradients are computed; empty for a whole backward, into all leaves.
  edge_list outputs;
};
using RunBackward = std::function<variable_list(const BackwardCall&)>;

struct EngineAnswers {
  /// Returns the hooks for the next tensor that autograd saves on this thread; nullptr: the tensor
  /// is saved unchanged.
  std::unique_ptr<SavedVariableHooks> (*hooks)();
  /// Computes a call for given outputs by one or more calls of libtorch's engine.
  variable_list (*execute)(const BackwardCall& call, const RunBackward& run);
};

/// libtorch's engine with the two functions of EngineAnswers. A test derives from it.
class AnsweringEngine : public torch::autograd::Engine {
 public:
  AnsweringEngine() = default;
  AnsweringEngine(const AnsweringEngine&) = delete;
  AnsweringEngine& operator=(const AnsweringEngine&) = delete;
  ~AnsweringEngine() override { stop(); }

  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override;
  variable_list execute(const edge_list& roots, const variable_list& gradients, bool keep_graph,
                        bool create_graph, bool accumulate, const edge_list& outputs) override;
};

/// Installs the given functions in the engine of the process; only the first call has an effect.
/// Returns false if the process has an engine that is neither libtorch's own nor an AnsweringEngine
/// (for example Python's): replacing it would break its users.
bool install_engine(const EngineAnswers& answers);

}  // namespace tessera::detail
TESSERA_API_END
