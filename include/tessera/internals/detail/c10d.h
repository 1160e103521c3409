// The stores and process groups of libtorch's c10d, and a filter for the lines that they log.
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

// The stores of c10d, by which the ranks of a job find each other. c10d is documented for Python
// only; its C++ headers warn that they may change. Only `comm` includes this header and
// c10d_nccl.h.
//
// Canary: C10dStoreCanary.

using c10d::Store;
using StorePtr = c10::intrusive_ptr<Store>;

/// Makes a store in the memory of this process.
StorePtr memory_store();

/// Whether `store`, apart from its prefixes, is a memory_store(). Calls of such a store do not
/// wait.
bool is_in_memory(const StorePtr& store);

/// The part of `store` whose keys begin with `prefix`.
StorePtr store_below(const std::string& prefix, const StorePtr& store);

struct TcpStore {
  std::string address;
  std::uint16_t port = 0;
  bool serves = false;  ///< whether this process runs the server to which the other ranks connect
  /// a bound socket that the server takes over; nullopt: the server opens a socket
  std::optional<int> listens_on = std::nullopt;
  std::chrono::milliseconds timeout{0};
};
/// Connects to a store. Does not wait for other ranks. A client waits without a time-out for the
/// first answer of the process that listens on the port.
StorePtr connect_store(const TcpStore& where);
/// The port of a store that connect_store() returned. A server with port 0 has chosen a free port.
std::uint16_t port_of(const StorePtr& store);

// c10d's process groups, with the interface that Gloo and NCCL share. Documented for Python only,
// where torch.distributed calls them through an operator of the dispatcher.
//
// Some of these functions may be renamed: the headers of 2.15 contain both names.
//
// Canary: C10dGroupCanary, on Gloo.

using Group = c10d::Backend;
using GroupPtr = c10::intrusive_ptr<Group>;

/// The type of a running collective. wait(time) throws both after the time-out and after a failure;
/// isCompleted() distinguishes the two cases.
using GroupWork = c10d::Work;
using GroupWorkPtr = c10::intrusive_ptr<GroupWork>;

using GroupReduceOp = c10d::ReduceOp;

// Each start_ function is collective. The returned work owns the tensors until the work is done.

GroupWorkPtr start_all_gather(Group& group, at::Tensor output, at::Tensor input);
GroupWorkPtr start_all_gather(Group& group, std::vector<at::Tensor> outputs,
                              std::vector<at::Tensor> inputs);
GroupWorkPtr start_all_reduce(Group& group, const at::Tensor& tensor, GroupReduceOp op);
GroupWorkPtr start_reduce_scatter(Group& group, at::Tensor output, at::Tensor input,
                                  GroupReduceOp op);
GroupWorkPtr start_reduce_scatter(Group& group, std::vector<at::Tensor> outputs,
                                  std::vector<at::Tensor> inputs, GroupReduceOp op);
/// `output_counts` and `input_counts` are numbers of elements of the first dimension.
GroupWorkPtr start_all_to_all(Group& group, at::Tensor output, at::Tensor input,
                              std::vector<std::int64_t> output_counts,
                              std::vector<std::int64_t> input_counts);
GroupWorkPtr start_broadcast(Group& group, const at::Tensor& tensor, int root);
GroupWorkPtr start_barrier(Group& group);

// A Gloo group, through c10d's ProcessGroupGloo. libtorch contains Gloo's symbols, but no wheel
// contains its headers. Debian's headers, of another version, are used only for the names of types.
//
// Canary: C10dGroupCanary.

struct GlooPlace {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};
  /// This host's address, to which the other ranks connect. Gloo's default is the address of the
  /// host name, which may belong to another network interface.
  std::string address;
};
/// Makes a Gloo group. Collective; only this group may use `store`.
GroupPtr make_gloo_group(const StorePtr& store, const GlooPlace& place);

// Filters libtorch's log: after an error that the library reports in one line, libtorch's stores
// and NCCL groups print pages. The log has one level for the process and no filter, and libtorch's
// threads write at any time. Each message is one write to std::cerr, so the filter replaces the
// buffer of std::cerr and drops messages by severity and source file.
//
// Canary: QuietLogCanary.

/// While a QuietLog exists, log lines of libtorch's stores and NCCL groups that repeat other errors
/// are dropped. TORCH_CPP_LOG_LEVEL takes precedence if it is set. Thread safe.
class QuietLog {
 public:
  QuietLog();
  QuietLog(const QuietLog&) = delete;
  QuietLog& operator=(const QuietLog&) = delete;
  ~QuietLog();
};

/// Applies TORCH_CPP_LOG_LEVEL, which libtorch reads only in Python.
void read_log_level();

}  // namespace tessera::detail
TESSERA_API_END
