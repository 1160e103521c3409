// Exceptions for files that cannot be read, and checks of their content.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// A file that could not be opened, examined or read. The content of such a file is unknown, and
/// the file may become readable later.
class ReadError : public Error {
 public:
  /// `missing`: the path of a file that does not exist.
  explicit ReadError(const std::string& message, std::filesystem::path missing = {})
      : Error(message), missing_(std::move(missing)) {}

  const std::filesystem::path& missing() const { return missing_; }

 private:
  std::filesystem::path missing_;
};

/// The byte order mark that some editors write at the beginning of a text.
inline constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

/// A hint about NaN and Infinity, to append to a JSON parser's message. Empty unless `fault`, the
/// invalid text, is NaN or Infinity.
std::string json_hint(std::string_view fault);

/// Throws Error if the content is a git-lfs pointer, which a repository contains in place of the
/// file itself.
void refuse_lfs_pointer(const std::filesystem::path& path, std::string_view content);

}  // namespace tessera::detail
TESSERA_API_END
