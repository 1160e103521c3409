#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// What editors of some systems write before a text.
inline constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

/// What to add to a JSON parser's message: a hint where the fault is NaN or Infinity; else "".
std::string json_hint(std::string_view fault);

/// Throws Error for a git-lfs pointer, which a repository holds in place of the file itself.
void refuse_lfs_pointer(const std::filesystem::path& path, std::string_view content);

}  // namespace tessera::detail
TESSERA_API_END
