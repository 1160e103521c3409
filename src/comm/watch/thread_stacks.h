#pragma once

#include <string>

namespace tessera::comm {

/// The stacks of all threads of this process except the calling one, as text, by a signal to each.
/// Says so for a thread that does not answer within 0.2 s. Thread safe.
std::string stacks_of_other_threads();

}  // namespace tessera::comm
