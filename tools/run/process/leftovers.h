#pragma once

#include <sys/types.h>

#include <set>

namespace tessera::run {

/// Before a process is started: the children that were there before an exec, such as a shell's.
std::set<pid_t> children_of_this_process();

/// Kills the children of this process and theirs, those that it has adopted among them, but for
/// `spared`.
void end_children_but(const std::set<pid_t>& spared);

}  // namespace tessera::run
