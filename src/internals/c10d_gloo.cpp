#include "tessera/internals/detail/c10d.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace tessera::detail {

GroupPtr make_gloo_group(const StorePtr& store, const GlooPlace& place) {
  using ProcessGroup = c10d::ProcessGroupGloo;
  auto options = ProcessGroup::Options::create(place.timeout);
  options->devices = {ProcessGroup::createDeviceForHostname(place.address)};
  return c10::make_intrusive<ProcessGroup>(store, place.rank, place.size, options);
}

}  // namespace tessera::detail
