#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <typeinfo>

#include "tessera/internals/detail/c10d.h"

namespace tessera::detail {

StorePtr memory_store() {
  return c10::make_intrusive<c10d::HashStore>();
}

bool is_in_memory(const StorePtr& store) {
  auto* const below = dynamic_cast<c10d::PrefixStore*>(store.get());
  const StorePtr own = below == nullptr ? store : below->getUnderlyingNonPrefixStore();
  const c10d::Store& type = *own;
  return typeid(type) == typeid(c10d::HashStore);
}

StorePtr store_below(const std::string& prefix, const StorePtr& store) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

StorePtr connect_store(const TcpStore& where) {
  c10d::TCPStoreOptions options;
  options.port = where.port;
  options.isServer = where.serves;
  options.waitWorkers = false;
  options.timeout = where.timeout;
  options.masterListenFd = where.listens_on;
  return c10::make_intrusive<c10d::TCPStore>(where.address, options);
}

std::uint16_t port_of(const StorePtr& store) {
  return dynamic_cast<c10d::TCPStore&>(*store).getPort();
}

void read_log_level() {
  c10::initLogging();
}

}  // namespace tessera::detail
