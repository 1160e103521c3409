// Autograd's engine, with two functions of this library. One chooses the hooks with which a tensor
// is kept for backward: libtorch's stack of such hooks holds only Python's objects, and in C++ it
// calls its engine. The other finds the gradient of a parameter that another tensor stands in for:
// a backward that a program asks for is a call of the engine.
//
// The engine is replaced by libtorch's own means for Python's, set_default_engine_stub; a process
// has one. To 2.12 graphs are owned by shared_ptr, from 2.13 by intrusive_ptr: not seen here.
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
  bool accumulate = false;  ///< into `.grad` of `outputs`; false: return their gradients
  edge_list outputs;        ///< none: a whole backward, into all leaves
};
using RunBackward = std::function<variable_list(const BackwardCall&)>;

struct EngineAnswers {
  /// The hooks of the next tensor that autograd keeps on this thread; nullptr: it is saved
  /// unchanged.
  std::unique_ptr<SavedVariableHooks> (*hooks)();
  /// Does a call for given outputs, by one or more calls of libtorch's engine.
  variable_list (*execute)(const BackwardCall& call, const RunBackward& run);
};

/// libtorch's engine except for these two functions. A test derives from it.
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

/// Makes the process ask these; the first call decides. False if it has an engine already that is
/// neither libtorch's own nor an AnsweringEngine, as Python's: replacing it would break its users.
bool install_engine(const EngineAnswers& answers);

}  // namespace tessera::detail
TESSERA_API_END
