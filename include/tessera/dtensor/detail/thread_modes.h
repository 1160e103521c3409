// Settings of a thread for operators on distributed tensors.
#pragma once

#include "tessera/dtensor/operator_mode.h"
#include "tessera/export.h"
#include "tessera/internals/detail/threads.h"

TESSERA_API_BEGIN
namespace tessera {

/// During this scope, operators of this thread are not intercepted by an OperatorMode. For internal
/// work of the library that is not part of the user's computation.
class OperatorModePause {
 public:
  OperatorModePause();

 private:
  detail::CarriedScope<detail::Carried::kOperatorMode, OperatorMode*> scope_;
};

/// The operator mode that is active on this thread, or nullptr if there is none.
OperatorMode* active_operator_mode();

/// Whether implicit communication is an Error on this thread (StrictScope).
bool is_strict();

/// Whether an operator on this thread treats plain tensors as replicated: in a ReplicationScope,
/// and while libtorch computes a gradient formula. False where a hook or a function of the program
/// may run instead of a gradient formula.
bool plain_tensors_are_replicated();

}  // namespace tessera
TESSERA_API_END
