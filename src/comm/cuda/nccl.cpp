// Process groups that use NCCL; a part of libtessera_cuda.so (cuda_backend.h).

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>

#include "backends.h"
#include "cuda/cuda_backend.h"
#include "cuda/events.h"
#include "group_info.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/c10d.h"
#include "tessera/internals/detail/c10d_nccl.h"
#include "tessera/internals/detail/devices.h"
#include "watch/watch.h"

namespace tessera::comm {
namespace {

using detail::NcclProcessGroup;
using detail::NcclProcessGroupPtr;
using std::chrono::milliseconds;

/// How much longer NCCL's time-out is than Tessera's. Tessera's time-out must come first, because
/// NCCL cannot name the missing ranks.
constexpr std::chrono::seconds kNcclPatience{30};

/// Disables libtorch's handling of NCCL errors, because Tessera's watchdog reports NCCL errors.
/// `done` is static, so that setenv() runs only once.
void leave_errors_to_the_watchdog() {
  static const int done = setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", /*overwrite=*/0);
  static_cast<void>(done);
}

/// Runs `end` (shutdown or abort of a process group) on a separate thread, because `end` can hang.
/// The thread keeps the process group alive until `end` returns.
std::future<void> begin_end(NcclProcessGroupPtr group, void (NcclProcessGroup::*end)(),
                            int device) {
  std::packaged_task<void()> task([group = std::move(group), end, device]() mutable {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    (group.get()->*end)();
    group.reset();
  });
  std::future<void> done = task.get_future();
  std::thread(std::move(task)).detach();
  return done;
}

/// Shuts down a process group, and calls `check` repeatedly during the shutdown. Returns false if
/// the shutdown takes longer than `patience`. Throws errors of the shutdown and of `check`.
bool shuts_down_in_time(NcclProcessGroupPtr group, int device, milliseconds patience,
                        const std::function<void()>& check) {
  constexpr milliseconds kLook{50};
  std::future<void> done = begin_end(std::move(group), &NcclProcessGroup::shutdown, device);
  for (milliseconds waited{0}; waited < patience; waited += kLook) {
    if (done.wait_for(kLook) == std::future_status::ready) {
      done.get();
      return true;
    }
    check();
  }
  return false;
}

/// Aborts a process group on another thread and waits for at most kPatience. Ignores errors,
/// because a destructor can call this function.
void abort_for_a_while(NcclProcessGroupPtr group, int device) {
  constexpr milliseconds kPatience{2000};
  begin_end(std::move(group), &NcclProcessGroup::abort, device).wait_for(kPatience);
}

/// Asks NCCL whether a communicator has failed. Thread safe. Separate from NcclGroup: the watchdog
/// must not own an NcclGroup, because the NcclGroup owns the watchdog.
class NcclHealth {
 public:
  /// Throws Error if NCCL has found an error since the last call, such as a lost connection.
  void check() const {
    const std::lock_guard lock(mutex_);
    if (communicator_ == nullptr) {
      return;
    }
    ncclResult_t state = ncclSuccess;
    if (ncclCommGetAsyncError(communicator_, &state) == ncclSuccess && state != ncclSuccess &&
        state != ncclInProgress) {
      fail("NCCL reported an error: ", ncclGetErrorString(state), " (",
           first_line(ncclGetLastError(communicator_)),
           "); look for the first error among the other ranks; NCCL_DEBUG=INFO shows more");
    }
  }
  void set_communicator(ncclComm_t communicator) {
    const std::lock_guard lock(mutex_);
    communicator_ = communicator;
  }

 private:
  mutable std::mutex mutex_;
  ncclComm_t communicator_ = nullptr;
};

/// NcclGroup creates, owns and closes c10d's process group for NCCL. Thread safe.
class NcclGroup {
 public:
  /// Makes the process group. Collective. `parent`: the group to split; nullptr for no split.
  NcclGroup(const detail::StorePtr& store, GroupInfo info, int device, const NcclGroup* parent)
      : info_(std::move(info)), device_(device) {
    leave_errors_to_the_watchdog();
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    process_group_ = detail::make_nccl_group(store, place_of(info_, parent));
    // Connects the GPUs, so that a failed connection throws before the first collective.
    detail::connect_gpu(*process_group_,
                        at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
    health_->set_communicator(detail::communicator_of(*process_group_));
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  /// Leaks a process group that was not closed: c10d's destructor needs CUDA, which can be unusable
  /// when the process ends.
  ~NcclGroup() { static_cast<void>(process_group_.release()); }

  const GroupInfo& info() const { return info_; }
  int device() const { return device_; }
  NcclProcessGroupPtr get() const {
    const std::lock_guard lock(mutex_);
    TESSERA_CHECK(process_group_ != nullptr, "group '", info_.name, "'", kWorldHasEnded);
    return process_group_;
  }
  const std::shared_ptr<NcclHealth>& health() const { return health_; }

  /// Closes the NCCL communicator together with the other ranks. If a rank does not call shutdown()
  /// within `patience`, aborts the communicator and throws PeerError. Later calls do nothing.
  void shutdown(milliseconds patience) {
    const NcclProcessGroupPtr group = take();
    if (group == nullptr) {
      return;
    }
    PeerWait wait(info_, "shutdown");
    std::string reason = "not all ranks called World::shutdown() within " +
                         std::to_string(patience.count()) + " ms; call shutdown() on every rank";
    try {
      if (shuts_down_in_time(group, device_, patience, [&] { wait.check(); })) {
        return;
      }
    } catch (const PeerError& error) {
      reason = error.what();
    } catch (const std::exception& error) {
      reason = first_line(error.what());
    }
    abort_for_a_while(group, device_);
    throw PeerError(reason);
  }
  /// Aborts the NCCL communicator without waiting for other ranks. Errors of NCCL are ignored.
  void abort() {
    if (NcclProcessGroupPtr group = take()) {
      abort_for_a_while(std::move(group), device_);
    }
  }

 private:
  NcclProcessGroupPtr take() {
    const std::lock_guard lock(mutex_);
    health_->set_communicator(nullptr);
    return std::exchange(process_group_, nullptr);
  }

  /// Describes the new group for c10d. Groups that are split from one parent are disjoint, so the
  /// first rank of a group is a unique `color` for ncclCommSplit.
  static detail::NcclGroupPlace place_of(const GroupInfo& info, const NcclGroup* parent) {
    return {.rank = info.rank,
            .size = info.size(),
            .timeout = info.timeout + kNcclPatience,
            .name = info.name,
            .ranks = info.ranks,
            .from = parent == nullptr ? nullptr : parent->get(),
            .color = info.ranks.front()};
  }

  GroupInfo info_;
  int device_;
  mutable std::mutex mutex_;
  detail::NcclProcessGroupPtr process_group_;
  const std::shared_ptr<NcclHealth> health_ = std::make_shared<NcclHealth>();
};

using NcclGroupPtr = std::shared_ptr<NcclGroup>;

/// Returns a flat view for collectives that only move data, because NCCL lacks complex numbers and
/// 16-bit integers. The element size determines the dtype, equally on all ranks.
at::Tensor as_moved(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.view({-1});
  switch (tensor.element_size()) {
    case 16:
    case 8:
      return flat.view(at::kLong);
    case 4:
      return flat.view(at::kInt);
    case 2:
      return flat.view(at::kBFloat16);
    default:
      return flat.view(at::kByte);
  }
}

std::vector<at::Tensor> all_as_moved(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> moved;
  for (const at::Tensor& tensor : tensors) {
    moved.push_back(as_moved(tensor));
  }
  return moved;
}

std::vector<std::int64_t> counts_as_moved(std::span<const std::int64_t> counts,
                                          const at::Tensor& tensor) {
  constexpr std::int64_t kWidest = 8;
  std::vector<std::int64_t> moved(counts.begin(), counts.end());
  if (tensor.element_size() > kWidest) {
    for (std::int64_t& count : moved) {
      count *= tensor.element_size() / kWidest;
    }
  }
  return moved;
}

std::vector<at::Tensor> all_flat(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& tensor : tensors) {
    flat.push_back(tensor.view({-1}));
  }
  return flat;
}

std::string nccl_text(const std::exception& error) {
  std::string text = first_line(error.what());
  constexpr std::string_view kPlace = "NCCL error in: ";
  const auto comma = text.find(", ");
  if (text.starts_with(kPlace) && comma != std::string::npos) {
    text.replace(0, comma + 2, "NCCL reported an error: ");
  }
  return text;
}

/// A running NCCL collective. wait() makes the current stream wait for NCCL's stream, and does not
/// block the calling thread.
class NcclWork final : public Work {
 public:
  NcclWork(NcclGroupPtr group, std::string collective, detail::GroupWorkPtr work)
      : group_(std::move(group)), collective_(std::move(collective)), work_(std::move(work)) {}

  void wait() override {
    const auto device = static_cast<c10::DeviceIndex>(group_->device());
    const c10::cuda::CUDAGuard guard(device);
    try {
      work_->wait();
    } catch (const std::exception& error) {
      throw PeerError(describe(group_->info(), collective_.c_str()) + ": " + nccl_text(error) +
                      "; look for the first error among the other ranks");
    }
    // c10d does not give access to the event that NCCL records. Therefore the event `reached_` is
    // recorded in the current stream, which already waits for NCCL.
    if (!detail::is_captured()) {
      reached_ = event_pool().take(device);
      reached_->record(c10::cuda::getCurrentCUDAStream(device));
    }
  }

  std::function<bool()> device_progress() override {
    if (reached_ == nullptr) {
      return nullptr;
    }
    // The watchdog's thread runs the returned function. Without the CUDAGuard the thread would
    // create a CUDA context on GPU 0.
    return [event = reached_, health = group_->health(), device = group_->device()] {
      const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
      const bool done = event->query();
      if (!done) {
        health->check();
      }
      return done;
    };
  }

 private:
  NcclGroupPtr group_;
  std::string collective_;
  detail::GroupWorkPtr work_;
  std::shared_ptr<at::cuda::CUDAEvent> reached_;
};

/// A communicator over c10d's process group for NCCL. Does not compare the ranks' calls: different
/// collectives hang until the time-out, unless agree_on_calls() finds the difference.
class NcclCommunicator final : public Communicator {
 public:
  explicit NcclCommunicator(NcclGroupPtr group)
      : Communicator(group->info().rank, group->info().size()), group_(std::move(group)) {}

  WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor to = as_moved(output);
    at::Tensor from = as_moved(input);
    return run("all_gather", [&](auto& group) { return group._allgather_base(to, from); });
  }

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    std::vector<at::Tensor> tensors{tensor};
    return run("all_reduce",
               [&](auto& group) { return group.allreduce(tensors, {.reduceOp = to_c10d(op)}); });
  }

  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor to = output.view({-1});
    at::Tensor from = input.view({-1});
    return run("reduce_scatter", [&](auto& group) {
      return group._reduce_scatter_base(to, from, {.reduceOp = to_c10d(op)});
    });
  }

  WorkPtr all_gather_group(const std::vector<at::Tensor>& outputs,
                           const std::vector<at::Tensor>& inputs) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::vector<at::Tensor> to = all_as_moved(outputs);
    std::vector<at::Tensor> from = all_as_moved(inputs);
    return run("all_gather",
               [&](auto& group) { return group.allgather_into_tensor_coalesced(to, from); });
  }

  WorkPtr reduce_scatter_group(const std::vector<at::Tensor>& outputs,
                               const std::vector<at::Tensor>& inputs, ReduceOp op) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::vector<at::Tensor> to = all_flat(outputs);
    std::vector<at::Tensor> from = all_flat(inputs);
    return run("reduce_scatter", [&](auto& group) {
      return group.reduce_scatter_tensor_coalesced(to, from, {.reduceOp = to_c10d(op)});
    });
  }

  bool moves_groups_in_place() const override { return true; }
  bool averages_while_reducing() const override { return true; }

  WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input,
                     std::span<const std::int64_t> output_counts,
                     std::span<const std::int64_t> input_counts) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor to = as_moved(output);
    at::Tensor from = as_moved(input);
    std::vector<std::int64_t> receives = counts_as_moved(output_counts, output);
    std::vector<std::int64_t> sends = counts_as_moved(input_counts, input);
    return run("all_to_all",
               [&](auto& group) { return group.alltoall_base(to, from, receives, sends); });
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::vector<at::Tensor> moved{as_moved(tensor)};
    return run("broadcast",
               [&](auto& group) { return group.broadcast(moved, {.rootRank = root}); });
  }

  // c10d allocates memory that is registered with the NCCL communicator, so that communicator must
  // exist before allocate() is called.
  at::Tensor allocate(std::int64_t numel, const c10::TensorOptions& options) override {
    const at::Device device = options.device();
    if (!device.is_cuda() ||
        !group_->get()->supportsTensorAlloc(static_cast<c10::DeviceIndex>(group_->device()))) {
      return Communicator::allocate(numel, options);
    }
    return guarded("allocate", [&](auto& group) { return group.allocateTensor(numel, options); });
  }

  /// Blocks the calling thread. Checks repeatedly whether other ranks have ended, because c10d's
  /// barrier would wait forever for a dead rank.
  void barrier() override {
    constexpr std::chrono::microseconds kNap{50};
    const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(group_->device()));
    const WorkPtr work = all_reduce(at::zeros({1}, at::device(device)), ReduceOp::kSum);
    work->wait();
    PeerWait peers(group_->info(), "barrier");
    for (const auto is_done = work->device_progress(); is_done != nullptr && !is_done();) {
      peers.check();
      std::this_thread::sleep_for(kNap);
    }
  }

  bool keeps_order_on_device() const override { return true; }
  void abort() override { group_->abort(); }
  void shutdown(std::chrono::milliseconds patience) override { group_->shutdown(patience); }
  std::string name() const override { return "nccl"; }
  const NcclGroup& group() const { return *group_; }

 private:
  // The NcclWork gets the collective's name for messages about errors that appear after run().
  template <class Start>
  WorkPtr run(const char* collective, Start&& start) {
    return std::make_shared<NcclWork>(group_, with_purpose(collective, purpose()),
                                      guarded(collective, start));
  }

  template <class Ask>
  std::invoke_result_t<Ask&, detail::NcclProcessGroup&> guarded(const char* what, Ask&& ask) {
    const detail::NcclProcessGroupPtr group = group_->get();
    try {
      return ask(*group);
    } catch (const c10::OutOfMemoryError& error) {
      fail(describe(group_->info(), with_purpose(what, purpose()).c_str()), ": ",
           first_line(error.what_without_backtrace()),
           "; use a smaller batch, or shard over more ranks");
    } catch (const std::exception& error) {
      fail(describe(group_->info(), with_purpose(what, purpose()).c_str()), ": ", nccl_text(error),
           "; NCCL_DEBUG=INFO shows more");
    }
  }

  // The NcclGroup is shared with NcclWork objects, which can outlive the communicator.
  NcclGroupPtr group_;
};

}  // namespace

CommunicatorPtr make_nccl_communicator(const detail::StorePtr& store, const GroupInfo& group,
                                       const NcclPlace& place) {
  // The cast of the parent is safe, because every parent was made by make_nccl_communicator().
  const auto* parent = static_cast<const NcclCommunicator*>(place.parent.get());
  try {
    return std::make_shared<NcclCommunicator>(std::make_shared<NcclGroup>(
        store, group, place.device, parent == nullptr ? nullptr : &parent->group()));
  } catch (const std::exception& error) {
    throw PeerError(describe(group, "set-up") + ": " + nccl_text(error) +
                    "; look for the first error among the other ranks; NCCL_DEBUG=INFO shows more");
  }
}

}  // namespace tessera::comm
