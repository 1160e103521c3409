// Reads settings from the environment of the process.
#pragma once

#include <dlfcn.h>

#include <filesystem>
#include <optional>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// Whether an environment variable is on ("1", "true", "on") or off ("0", "false", "off"); nullopt
/// if it is not set, or empty. Throws Error, with the allowed values, for any other value. Reads
/// the environment at each call, so hot code should store the result. Thread safe unless another
/// thread calls setenv().
std::optional<bool> environment_switch(const char* name);

/// Whether TESSERA_DEBUG is on: ranks then compare their calls and values, at the cost of
/// collectives and synchronisation. `unset` is returned if the variable is not set.
bool debug_checks(bool unset = false);

/// The path of a library with file name `name`, in the folder of the library that contains
/// `function`.
inline std::string library_beside(const void* function, const char* name) {
  Dl_info info{};
  const bool found = dladdr(function, &info) != 0;
  return found ? (std::filesystem::path(info.dli_fname).parent_path() / name).string() : name;
}

}  // namespace tessera::detail
TESSERA_API_END
