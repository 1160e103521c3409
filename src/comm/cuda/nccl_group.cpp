// Part of libtessera_cuda.so: see cuda_backend.h.
#include "cuda/nccl_group.h"

#include <c10/cuda/CUDAGuard.h>

#include <cstdlib>
#include <future>
#include <thread>
#include <utility>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "watch/group_watch.h"
#include "watch/peer_wait.h"

namespace tessera::comm {
namespace {

using detail::NcclProcessGroup;
using detail::NcclProcessGroupPtr;
using std::chrono::milliseconds;

/// NCCL's own time-out comes second: it does not know who is missing.
constexpr std::chrono::seconds kNcclPatience{30};

/// When libtorch ends a process it prints pages, without the call: the watchdog does it in a line.
/// The setting is read when a process group is made. `done` makes this happen once in a process.
void leave_errors_to_the_watchdog() {
  static const int done = setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", /*overwrite=*/0);
  static_cast<void>(done);
}

/// The groups of one split are disjoint: the first rank tells them apart.
detail::NcclGroupPlace place_of(const GroupInfo& info, const NcclGroup* parent) {
  return {.rank = info.rank,
          .size = info.size(),
          .timeout = info.timeout + kNcclPatience,
          .name = info.name,
          .ranks = info.ranks,
          .from = parent == nullptr ? nullptr : parent->get(),
          .color = info.ranks.front()};
}

/// Runs `end` on a separate thread, since it is known to hang: then the thread keeps the process
/// group.
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

/// Returns false if the group's shutdown did not return within `patience`. Throws what it or
/// `check` throws.
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

/// Its errors stay on its thread: the group is given up, and this may run in a destructor.
void abort_for_a_while(NcclProcessGroupPtr group, int device) {
  constexpr milliseconds kPatience{2000};
  begin_end(std::move(group), &NcclProcessGroup::abort, device).wait_for(kPatience);
}

}  // namespace

void NcclHealth::check() const {
  const std::lock_guard lock(mutex_);
  if (communicator_ == nullptr) {
    return;
  }
  ncclResult_t state = ncclSuccess;
  if (ncclCommGetAsyncError(communicator_, &state) == ncclSuccess && state != ncclSuccess &&
      state != ncclInProgress) {
    fail("NCCL met an error: ", ncclGetErrorString(state), " (",
         first_line(ncclGetLastError(communicator_)),
         "); look for the first error among the other ranks, NCCL_DEBUG=INFO shows more");
  }
}

void NcclHealth::set_communicator(ncclComm_t communicator) {
  const std::lock_guard lock(mutex_);
  communicator_ = communicator;
}

NcclGroup::NcclGroup(const detail::StorePtr& store, GroupInfo info, int device,
                     const NcclGroup* parent)
    : info_(std::move(info)), device_(device) {
  leave_errors_to_the_watchdog();
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  process_group_ = detail::make_nccl_group(store, place_of(info_, parent));
  // So that what fails is this set-up and not the first collective.
  detail::connect_gpu(*process_group_,
                      at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
  health_->set_communicator(detail::communicator_of(*process_group_));
}

NcclGroup::~NcclGroup() {
  static_cast<void>(process_group_.release());
}

NcclProcessGroupPtr NcclGroup::get() const {
  const std::lock_guard lock(mutex_);
  TESSERA_CHECK(process_group_ != nullptr, "group '", info_.name, "'", kWorldHasEnded);
  return process_group_;
}

NcclProcessGroupPtr NcclGroup::take() {
  const std::lock_guard lock(mutex_);
  health_->set_communicator(nullptr);
  return std::exchange(process_group_, nullptr);
}

void NcclGroup::shutdown(milliseconds patience) {
  const NcclProcessGroupPtr group = take();
  if (group == nullptr) {
    return;
  }
  PeerWait wait(info_, "shutdown");
  std::string reason = "its ranks did not all come within " + std::to_string(patience.count()) +
                       " ms; every rank must call World::shutdown()";
  try {
    if (shuts_down_in_time(group, device_, patience,
                           [&] { wait.check([&] { return info_.watch->missing(); }); })) {
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

void NcclGroup::abort() {
  if (NcclProcessGroupPtr group = take()) {
    abort_for_a_while(std::move(group), device_);
  }
}

}  // namespace tessera::comm
