#pragma once

#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

// The modules whose forwards this thread is in, for messages of TESSERA_DEBUG=1.

/// `fqn`: of a module that begins its forward; it ends with pop_module_name().
void push_module_name(std::string fqn);
void pop_module_name();
/// " in 'layers.0.attn'", of the innermost; empty where none has told its name.
std::string in_module();

}  // namespace tessera::detail
TESSERA_API_END
