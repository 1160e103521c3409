// The stores of c10d, in which the ranks of a job find each other. c10d is documented for Python
// alone; its C++ headers warn that they may change. Only `comm` uses it, as all headers that begin
// with c10d_.
//
// No version differs in what is used.
//
// Canary: C10dStoreCanary.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

using c10d::Store;
using StorePtr = c10::intrusive_ptr<Store>;

/// In this process.
StorePtr memory_store();

/// Whether `store`, or that below its prefixes, is a memory_store(): its calls do not wait for
/// anybody.
bool is_in_memory(const StorePtr& store);

/// Keys of `store` that begin with `prefix`.
StorePtr store_below(const std::string& prefix, const StorePtr& store);

struct TcpStore {
  std::string address;
  std::uint16_t port = 0;
  bool serves = false;                           ///< the others connect to this rank's
  std::optional<int> listens_on = std::nullopt;  ///< a bound socket, which the server takes over
  std::chrono::milliseconds timeout{0};
};
/// Does not wait for other ranks. A client waits without end for the first answer of whatever
/// listens on the port.
StorePtr connect_store(const TcpStore& where);

}  // namespace tessera::detail
TESSERA_API_END
