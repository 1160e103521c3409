#pragma once

#include <string>

namespace tessera::comm {

/// The stack of each thread of this process but the calling one, as text, by a signal to each. A
/// thread that does not answer within 0.2 s is said so. Thread safe.
std::string stacks_of_other_threads();

}  // namespace tessera::comm
