#pragma once

#include <string>

#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// As the libraries write them: NCCL 2.28.9 is 22809, cuDNN 9.19.0 is 91900; 0: not known.
struct LibraryVersions {
  int nccl_header = 0;    ///< of the nccl.h that libtessera_cuda.so was compiled with
  int nccl_libtorch = 0;  ///< of the one that libtorch was compiled with
  int nccl_loaded = 0;
  int cudnn_libtorch = 0;
  int cudnn_loaded = 0;
};

/// Throws Error where NCCL cannot be used: libtorch's options hold structures of nccl.h, which must
/// be one for both, and what is loaded must know them.
void check_nccl(const LibraryVersions& versions);
/// A warning about features that an old cuDNN lacks; "": nothing.
std::string cudnn_warning(const LibraryVersions& versions);

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
