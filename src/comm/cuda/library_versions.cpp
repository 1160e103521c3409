#include "cuda/library_versions.h"

#include <fmt/format.h>

#include "tessera/core/error.h"

namespace tessera::comm {

namespace {

/// "2.28.9".
std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace

void check_nccl(const LibraryVersions& versions) {
  TESSERA_CHECK(versions.nccl_header == versions.nccl_libtorch,
                "backend nccl: Tessera was built with the header of NCCL ",
                version_text(versions.nccl_header), ", libtorch with that of NCCL ",
                version_text(versions.nccl_libtorch),
                "; build Tessera with the nccl.h of that version (-DTESSERA_NCCL_INCLUDE=DIR)");
  TESSERA_CHECK(versions.nccl_loaded >= versions.nccl_libtorch, "backend nccl: NCCL ",
                version_text(versions.nccl_loaded), " is loaded, and libtorch needs ",
                version_text(versions.nccl_libtorch),
                " or newer; scripts/setup installs it, or put a newer libnccl.so.2 first on "
                "LD_LIBRARY_PATH");
}

std::string cudnn_warning(const LibraryVersions& versions) {
  if (versions.cudnn_loaded == 0 || versions.cudnn_loaded >= versions.cudnn_libtorch) {
    return "";
  }
  return fmt::format(
      "cuDNN {} is loaded, and libtorch was built with {}: attention may take a slower kernel; "
      "scripts/setup installs that version, or put it first on LD_LIBRARY_PATH",
      version_text(versions.cudnn_loaded), version_text(versions.cudnn_libtorch));
}

}  // namespace tessera::comm
