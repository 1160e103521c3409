#include "tessera/dtensor/operator_mode.h"

#include <utility>

namespace tessera {
namespace {

thread_local OperatorMode* mode_here = nullptr;

}  // namespace

OperatorModeScope::OperatorModeScope(OperatorMode& mode)
    : outer_(std::exchange(mode_here, &mode)), guard_(c10::DispatchKey::Fake) {}
OperatorModeScope::~OperatorModeScope() {
  mode_here = outer_;
}

OperatorModePause::OperatorModePause() : outer_(std::exchange(mode_here, nullptr)) {}
OperatorModePause::~OperatorModePause() {
  mode_here = outer_;
}

OperatorMode* active_operator_mode() {
  return mode_here;
}

}  // namespace tessera
