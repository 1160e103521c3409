// A group of Gloo's, through c10d's ProcessGroupGloo: Gloo's own symbols are in libtorch, and its
// headers in no wheel. They are Debian's, of another version, of which only the names of types are
// used.
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
  /// Of this host, which the peers reach. By default Gloo would take the host name's, which may be
  /// of another interface.
  std::string address;
};
/// Collective; `store` is this group's alone.
GroupPtr make_gloo_group(const StorePtr& store, const GlooPlace& place);

}  // namespace tessera::detail
TESSERA_API_END
