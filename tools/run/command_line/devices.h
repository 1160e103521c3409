// What this node has to start ranks for.

#pragma once

namespace tessera::run {

/// GPUs that this process may use.
int count_gpus();

/// Cores that this process may use; a container or a batch system may allow fewer than there are.
int usable_cores();

}  // namespace tessera::run
