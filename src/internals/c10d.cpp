#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <iostream>
#include <streambuf>
#include <string_view>
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

GroupWorkPtr start_all_gather(Group& group, at::Tensor output, at::Tensor input) {
  return group._allgather_base(output, input);
}

GroupWorkPtr start_all_gather(Group& group, std::vector<at::Tensor> outputs,
                              std::vector<at::Tensor> inputs) {
  return group.allgather_into_tensor_coalesced(outputs, inputs);
}

GroupWorkPtr start_all_reduce(Group& group, const at::Tensor& tensor, GroupReduceOp op) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = std::move(op);
  return group.allreduce(tensors, options);
}

GroupWorkPtr start_reduce_scatter(Group& group, at::Tensor output, at::Tensor input,
                                  GroupReduceOp op) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = std::move(op);
  return group._reduce_scatter_base(output, input, options);
}

GroupWorkPtr start_reduce_scatter(Group& group, std::vector<at::Tensor> outputs,
                                  std::vector<at::Tensor> inputs, GroupReduceOp op) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = std::move(op);
  return group.reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

GroupWorkPtr start_all_to_all(Group& group, at::Tensor output, at::Tensor input,
                              std::vector<std::int64_t> output_counts,
                              std::vector<std::int64_t> input_counts) {
  return group.alltoall_base(output, input, output_counts, input_counts);
}

GroupWorkPtr start_broadcast(Group& group, const at::Tensor& tensor, int root) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return group.broadcast(tensors, options);
}

GroupWorkPtr start_barrier(Group& group) {
  return group.barrier();
}

namespace {

struct Source {
  /// A source file of libtorch, as libtorch's log messages name it before the line number.
  std::string_view file;
  std::string_view severities;  ///< severities to drop: E for errors, W for warnings
};

/// Sources of log messages that repeat other errors: errors of process groups, which this library's
/// watchdog reports, and failures of the store, which are thrown.
constexpr std::array<Source, 5> kNoise = {{{"ProcessGroupNCCL.cpp:", "E"},
                                           {"TCPStore.cpp:", "WE"},
                                           {"TCPStoreBackend.cpp:", "WE"},
                                           {"TCPStoreLibUvBackend.cpp:", "WE"},
                                           {"socket.cpp:", "WE"}}};

/// Whether a log message repeats an error that is reported elsewhere. A message looks like "[E1122
/// 23:40:19.069930443 socket.cpp:612] text", after "[rank1]:" if libtorch knows the rank.
bool is_noise(std::string_view text) {
  if (text.starts_with("[rank")) {
    text.remove_prefix(std::min(text.find(':'), text.size() - 1) + 1);
  }
  const std::string_view head = text.substr(0, text.find(']'));
  const std::string_view place = head.substr(head.rfind(' ') + 1);
  return std::ranges::any_of(kNoise, [&](const Source& source) {
    return head.size() > 2 && head[0] == '[' &&
           source.severities.find(head[1]) != std::string_view::npos &&
           place.starts_with(source.file);
  });
}

std::atomic<int> open_scopes = 0;

/// A stream buffer that drops messages by is_noise(). It stores nothing, so threads need no lock.
class Filter final : public std::streambuf {
 public:
  explicit Filter(std::streambuf& to) : to_(to) {}

 protected:
  std::streamsize xsputn(const char* text, std::streamsize size) override {
    const bool noise = open_scopes > 0 && is_noise({text, static_cast<std::size_t>(size)});
    return noise ? size : to_.sputn(text, size);
  }
  int_type overflow(int_type character) override {
    return traits_type::eq_int_type(character, traits_type::eof())
               ? traits_type::not_eof(character)
               : to_.sputc(traits_type::to_char_type(character));
  }
  int sync() override { return to_.pubsync(); }

 private:
  std::streambuf& to_;
};

/// Installs a Filter in std::cerr and never removes it, because other threads may be writing.
void filter_errors() {
  static std::streambuf* const before = std::cerr.rdbuf(new Filter(*std::cerr.rdbuf()));
  static_cast<void>(before);
}

bool chosen_by_user() {
  static const bool chosen = std::getenv("TORCH_CPP_LOG_LEVEL") != nullptr;
  return chosen;
}

}  // namespace

QuietLog::QuietLog() {
  if (!chosen_by_user()) {
    filter_errors();
  }
  ++open_scopes;
}

QuietLog::~QuietLog() {
  --open_scopes;
}

void read_log_level() {
  c10::initLogging();
}

}  // namespace tessera::detail
