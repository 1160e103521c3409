#pragma once

namespace tessera::detail {

/// Adds one to implicit_redistributions() of this thread.
void count_implicit_redistribution();

}  // namespace tessera::detail
