// Functions that read settings from environment variables.
#pragma once

#include <dlfcn.h>

#include <filesystem>
#include <optional>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// Returns whether environment variable `name` is on ("1", "true", "on") or off ("0", "false",
/// "off"); nullopt if unset or empty. Throws Error for any other value. Reads the environment at
/// each call. Thread safe unless a thread calls setenv().
std::optional<bool> environment_switch(const char* name);

/// Returns whether TESSERA_DEBUG is on; `unset` if the variable is not set. If TESSERA_DEBUG is on,
/// extra collectives compare the calls and values of the ranks.
bool debug_checks(bool unset = false);

/// Returns the path of the shared library `name` in the folder of the shared library that contains
/// `function`.
inline std::string library_beside(const void* function, const char* name) {
  Dl_info info{};
  const bool found = dladdr(function, &info) != 0;
  return found ? (std::filesystem::path(info.dli_fname).parent_path() / name).string() : name;
}

}  // namespace tessera::detail
TESSERA_API_END
