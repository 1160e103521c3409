#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/export.h"
#include "tessera/internals/detail/threads.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// What a rank does at a moment of a step.
enum class Activity : std::uint8_t {
  kForward,        ///< of a module
  kRecomputation,  ///< a forward that backward repeats (activation checkpointing)
  kBackward,       ///< of what a module's forward recorded
  kScope,          ///< of the program: libtorch's RECORD_USER_SCOPE("name")
};
/// "forward", "recomputation", "backward" or "scope".
const char* to_string(Activity activity);

/// Gets a rank's activities from a ModuleWatch. They are nested: left() ends the one entered last.
/// Called on the activity's thread, forward's or autograd's, never on two at a time.
class ActivityListener {
 public:
  virtual ~ActivityListener() = default;
  /// `name`: the FQN of a module; of the model itself the name of its class.
  virtual void entered(Activity activity, const std::string& name) = 0;
  virtual void left() = 0;
};

/// Follows which module of a model runs. Forward shows in hooks; backward in the numbers that
/// autograd's nodes get, in order, when they are made, as in PyTorch's profiler: what a forward
/// made is that module's backward. Collectives of hooks that were there before (FSDP's, and those
/// of tensor-parallel styles) come before or after the module, within the one around it.
class ModuleWatch {
 public:
  /// Adds permanent hooks to all modules, which cost a comparison outside of a Scope. Call it when
  /// the model is ready for its first forward. Not collective.
  explicit ModuleWatch(nn::ModuleBase& model);
  /// For as long as the watch exists. Not within a Scope.
  void add(ActivityListener& listener);

  class State;
  /// While it exists, the listeners get events of this thread, and of autograd's threads in the
  /// backwards that it calls. One at a time; for whole steps.
  class Scope {
   public:
    explicit Scope(const ModuleWatch& watch);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope();

   private:
    std::shared_ptr<State> state_;
    detail::CarriedScope<detail::Carried::kModuleWatch, State*> carried_;
    std::uint64_t callback_;
  };

 private:
  std::shared_ptr<State> state_;  ///< shared with the hooks
};

}  // namespace tessera::observe
TESSERA_API_END
