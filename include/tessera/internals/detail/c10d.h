// The stores and process groups of libtorch's c10d.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

// The stores of c10d, by which the ranks of a job find each other. c10d's C++ interface is
// undocumented and can change, so only src/comm includes this header and c10d_nccl.h.
//
// Canary: C10dStoreCanary, a test of libtorch itself.

using c10d::Store;
using StorePtr = c10::intrusive_ptr<Store>;

/// Makes a store in the memory of this process.
StorePtr memory_store();

/// Whether `store` is in memory: made by memory_store(), perhaps with prefixes (store_below()).
/// Calls of such a store do not wait.
bool is_in_memory(const StorePtr& store);

/// Returns a store that uses `store` for its values and prepends `prefix` to each key.
StorePtr store_below(const std::string& prefix, const StorePtr& store);

struct TcpStore {
  std::string address;
  std::uint16_t port = 0;
  bool serves = false;  ///< whether this process runs the server of the store for all ranks
  /// A bound socket that the store's server uses; nullopt: the server opens a socket.
  std::optional<int> listens_on = std::nullopt;
  std::chrono::milliseconds timeout{0};
};
/// Connects to a store. Does not wait for other ranks. A client waits without a time-out for the
/// first answer of the server.
StorePtr connect_store(const TcpStore& where);
/// Returns the port of a store that connect_store() made. For port 0 the server has chosen a free
/// port.
std::uint16_t port_of(const StorePtr& store);

// c10d's process groups: the interface of Gloo and NCCL. The C++ interface is undocumented.
// libtorch 2.15 has renamed functions, but still has the old names.
//
// Canary: C10dGroupCanary, a test of libtorch itself, with Gloo.

using Group = c10d::Backend;
using GroupPtr = c10::intrusive_ptr<Group>;

/// A running collective of a c10d process group. wait(time) throws after the time-out and after a
/// failure. isCompleted() is false after a time-out.
using GroupWork = c10d::Work;
using GroupWorkPtr = c10::intrusive_ptr<GroupWork>;

using GroupReduceOp = c10d::ReduceOp;

// A Gloo process group, through c10d's ProcessGroupGloo. libtorch's wheels lack Gloo's headers.
// Debian's headers supply only type names, so their version does not matter.
//
// Canary: C10dGroupCanary, a test of libtorch itself.

struct GlooPlace {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};
  /// The address by which other ranks reach this machine. Gloo's default, the address of the host
  /// name, can belong to a wrong network interface.
  std::string address;
};
/// Makes a Gloo process group. Collective. Only this group may use `store`.
GroupPtr make_gloo_group(const StorePtr& store, const GlooPlace& place);

/// Sets libtorch's log level to TORCH_CPP_LOG_LEVEL, which libtorch itself reads only in Python.
void read_log_level();

}  // namespace tessera::detail
TESSERA_API_END
