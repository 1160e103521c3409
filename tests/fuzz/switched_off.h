#pragma once

#include "fuzz/choices.h"

namespace tessera::fuzz {

/// Options that the test's search leaves out, because cases with them are known to differ from one
/// rank. A search by hand draws them.
const Choices::Off& switched_off();

}  // namespace tessera::fuzz
