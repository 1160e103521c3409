#pragma once

#include <functional>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// The main function of one rank: runs `body` and returns 0. If it throws, prints one line on
/// standard error, with the rank and the message and without libtorch's stack, and ends the process
/// with status 1 at once, so that peers that wait for this rank end too; other objects of main()
/// are not destroyed. Ignores SIGXFSZ: a file that grows beyond the limit of its size is an error.
///
///   int main() {
///     return comm::run_main([] {
///       const comm::WorldPtr world = comm::world_from_environment();
///       ...
///     });
///   }
int run_main(const std::function<void()>& body);

}  // namespace tessera::comm
TESSERA_API_END
