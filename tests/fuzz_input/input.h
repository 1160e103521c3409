// What the fuzz targets share. Each gives the fuzzer's bytes to one parser of what strangers write.
// The parser takes them or throws Error with a message of one line; anything else ends the process,
// which is a finding.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "tessera/core/error.h"

namespace tessera::fuzz_input {

inline std::string text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

template <class Parse>
void parse_or_refuse(const Parse& parse) {
  try {
    parse();
  } catch (const Error& error) {
    const std::string_view message = error.what();
    if (message.empty() || message.find('\n') != message.npos) {
      std::fprintf(stderr, "the message is not one line: %s\n", error.what());
      std::abort();
    }
  }
}

/// A folder of this process, in memory where there is such a file system.
inline const std::filesystem::path& own_folder() {
  static const std::filesystem::path folder = [] {
    const std::filesystem::path memory = "/dev/shm";
    std::string name =
        ((std::filesystem::is_directory(memory) ? memory : std::filesystem::temp_directory_path()) /
         "tessera-fuzz-XXXXXX")
            .string();
    if (mkdtemp(name.data()) == nullptr) {
      std::abort();
    }
    std::atexit([] { std::filesystem::remove_all(own_folder()); });
    return std::filesystem::path(name);
  }();
  return folder;
}

inline std::filesystem::path write_input(const std::string& name, const std::string& bytes) {
  const std::filesystem::path path = own_folder() / name;
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
  return path;
}

}  // namespace tessera::fuzz_input
