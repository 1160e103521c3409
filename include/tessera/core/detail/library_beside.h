#pragma once

#include <dlfcn.h>

#include <filesystem>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// The path of the library `name` beside the one that holds `function`, wherever that is installed.
inline std::string library_beside(const void* function, const char* name) {
  Dl_info info{};
  const bool found = dladdr(function, &info) != 0;
  return found ? (std::filesystem::path(info.dli_fname).parent_path() / name).string() : name;
}

}  // namespace tessera::detail
TESSERA_API_END
