// Errors of files that are read.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// A file that could not be opened, looked at or read: nothing is known of its bytes, and a moment
/// later it may be readable.
class ReadError : public Error {
 public:
  /// `missing`: the file, where there is none of that name.
  explicit ReadError(const std::string& message, std::filesystem::path missing = {})
      : Error(message), missing_(std::move(missing)) {}

  const std::filesystem::path& missing() const { return missing_; }

 private:
  std::filesystem::path missing_;
};

/// The mark that some editors write before a text.
inline constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

/// What to add to a JSON parser's message: a hint where the fault is NaN or Infinity; else "".
std::string json_hint(std::string_view fault);

/// Throws Error for a git-lfs pointer, which a repository holds in place of the file itself.
void refuse_lfs_pointer(const std::filesystem::path& path, std::string_view content);

}  // namespace tessera::detail
TESSERA_API_END
