#pragma once

#include <filesystem>
#include <string>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// A file that could not be opened, looked at or read: nothing is known of its bytes, and a moment
/// later it may be read.
class ReadError : public Error {
 public:
  /// `missing`: the file, where there is none of that name.
  explicit ReadError(const std::string& message, std::filesystem::path missing = {})
      : Error(message), missing_(std::move(missing)) {}

  const std::filesystem::path& missing() const { return missing_; }

 private:
  std::filesystem::path missing_;
};

}  // namespace tessera::detail
TESSERA_API_END
