// A group of Gloo's, through c10d's ProcessGroupGloo. Gloo's symbols are in libtorch, but no wheel
// has its headers. Debian's headers, of another version, are used for the names of types only.
//
// No version differs in what is used.
//
// Canary: C10dGroupCanary.
#pragma once

#include <chrono>
#include <string>

#include "tessera/export.h"
#include "tessera/internals/detail/c10d_group.h"
#include "tessera/internals/detail/c10d_store.h"

TESSERA_API_BEGIN
namespace tessera::detail {

struct GlooPlace {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};
  /// This host's address for the peers. By default Gloo would take the host name's address, which
  /// may be of another interface.
  std::string address;
};
/// Collective; `store` is this group's alone.
GroupPtr make_gloo_group(const StorePtr& store, const GlooPlace& place);

}  // namespace tessera::detail
TESSERA_API_END
