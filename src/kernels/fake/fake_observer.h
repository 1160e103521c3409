#pragma once

#include "tessera/kernels/fake_mode.h"

namespace tessera::kernels {

/// Tells the observer of the FakeMode of a call that comes through no dispatcher: of a kernel of
/// our own, which does not run there.
void observe_fake_call(const FakeCall& call);

}  // namespace tessera::kernels
