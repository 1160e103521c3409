#include "tessera/core/detail/text_faults.h"

#include "tessera/core/error.h"

namespace tessera::detail {

std::string json_hint(std::string_view fault) {
  const bool is_number = fault.ends_with("N'") || fault.ends_with("I'");
  return is_number ? ": NaN and Infinity, which Python writes, are no JSON; write a number or null"
                   : "";
}

void refuse_lfs_pointer(const std::filesystem::path& path, std::string_view content) {
  TESSERA_CHECK(
      !content.starts_with("version https://git-lfs.github.com/spec/"), "'", path.string(),
      "' is a pointer of git-lfs to a file that was not downloaded: fetch the file itself "
      "(git lfs pull)");
}

}  // namespace tessera::detail
