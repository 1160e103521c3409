#pragma once

#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Ends this process with status 1 and one line on standard error, "`who`: `message`", without
/// libtorch's stack. At once, without the teardown of a healthy process, since peers may wait for
/// this rank.
[[noreturn]] void end_program(const std::string& who, std::string message);

}  // namespace tessera
TESSERA_API_END
