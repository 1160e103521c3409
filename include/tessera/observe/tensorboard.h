#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// Writes values to a TensorBoard event file: a TFRecord file of Event messages (TensorFlow's
/// event.proto). For use by one thread of one rank.
class TensorBoardWriter {
 public:
  /// Creates an event file in `folder`; creates a missing folder. `first_step`: TensorBoard ignores
  /// older files from this step on, for a resumed run. Throws Error if the file can't be written.
  explicit TensorBoardWriter(const std::filesystem::path& folder, std::int64_t first_step = 1);
  /// Writes pairs of a tag and a value for a step, as fp32, and flushes the file. Throws Error if
  /// the file can't be written.
  void write(std::int64_t step, const std::vector<std::pair<std::string, double>>& scalars);

  const std::filesystem::path& path() const { return path_; }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  void write_event(const std::string& event);

  std::filesystem::path path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace tessera::observe
TESSERA_API_END
