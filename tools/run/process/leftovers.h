#pragma once

#include <sys/types.h>

namespace tessera::run {

/// Kills the children of this process and theirs, those that it has adopted among them, but for
/// `spared`.
void end_children_but(pid_t spared);

}  // namespace tessera::run
