#pragma once

#include <functional>

#include "tessera/export.h"
#include "tessera/internals/detail/key_scopes.h"
#include "tessera/kernels/fake_mode.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

/// In its scope operators on tensors of the CPU run as without it, and each that a FakeMode would
/// see is timed. It covers this thread and its backwards, and is a process's only one, and beside
/// no FakeMode: else it throws Error.
class OperatorTimer {
 public:
  /// Called after each such operator with the seconds that it has taken.
  using Observer = std::function<void(const FakeCall&, double seconds)>;
  explicit OperatorTimer(Observer observer);
  OperatorTimer(const OperatorTimer&) = delete;
  OperatorTimer& operator=(const OperatorTimer&) = delete;
  ~OperatorTimer();

 private:
  tessera::detail::IncludeKeys included_;
};

}  // namespace tessera::kernels
TESSERA_API_END
