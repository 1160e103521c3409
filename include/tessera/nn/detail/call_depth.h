#pragma once

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

class ModuleBase;

namespace detail {

/// How many calls of modules this thread is in, one inside another: 1 in the outermost.
int call_depth();
/// The module of the outermost; nullptr outside of calls.
const ModuleBase* outermost_call();

}  // namespace detail

}  // namespace tessera::nn
TESSERA_API_END
