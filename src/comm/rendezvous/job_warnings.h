#pragma once

#include "rendezvous/store_world.h"

namespace tessera::comm {

/// From now on a warning on this thread (TORCH_WARN, libtorch's or ours) is one line of standard
/// error, "tessera: warning: TEXT [rank 0]". Each text comes once a job: on rank 0 if it has it
/// about when the others do, else on the first rank that has it. A handler of the program's own
/// stays.
void show_warnings_once(const JobInfo& job);

}  // namespace tessera::comm
