#include "watch/watchdog.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <utility>

#include "host/host.h"
#include "tessera/comm/detail/rank_threads.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kTick{200};

/// Blocks all signals on this thread, so that the program's signal handlers do not run on this
/// thread.
void block_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

/// The beginning of a message about a call.
std::string beginning(const WorldWatch& world, const BegunCall& call) {
  const auto known = flight::read_call(world.own(), call.order);
  return detail::concat(known ? flight::to_text(world.own(), known->label) : "a collective",
                        ", rank ", world.settings().rank, ": ");
}

/// Writes NCCL's flight record into the folder of the flight records, or into a temporary folder.
/// Returns a text about the file; "" if there is no record.
std::string write_device_record(const WorldWatch& world) {
  if (!world.device_record()) {
    return "";
  }
  try {
    const std::string folder =
        run_folder().empty() ? (std::filesystem::temp_directory_path() / "tessera-records").string()
                             : run_folder();
    // The file gets the name for which PyTorch's torchfrtrace looks.
    const std::string path = detail::concat(folder, "/nccl_trace_rank_", world.settings().rank);
    std::filesystem::create_directories(folder);
    files::write_file(path, world.device_record()());
    return "tessera watchdog: NCCL's flight record is " + path + "\n";
  } catch (const std::exception&) {
    return "";  // an error of the file must not hide the error of the call
  }
}

}  // namespace

Watchdog::~Watchdog() {
  stop();
}

void Watchdog::stop() {
  // The calls are destroyed without the lock, because destroying a call may end a world.
  std::vector<DeviceCall> left;
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
    left.swap(added_);
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
  std::exchange(calls_, {}).clear();
}

void Watchdog::await(std::function<bool()> is_done, const BegunCall& call,
                     std::shared_ptr<const WatchedGroup> group) {
  const std::lock_guard lock(mutex_);
  if (stops_) {
    return;
  }
  set_waits(world_.own(), call, true);
  added_.push_back({std::move(is_done), call, std::move(group)});
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { run(); });
  }
}

void Watchdog::run() {
  block_signals();
  pthread_setname_np(pthread_self(), "tessera-watch");
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kTick, [this] { return stops_; })) {
    std::ranges::move(added_, std::back_inserter(calls_));
    added_.clear();
    lock.unlock();
    tick();
    lock.lock();
  }
}

void Watchdog::tick() {
  const auto ended = std::erase_if(calls_, [this](const DeviceCall& call) {
    try {
      if (!call.is_done()) {
        return false;
      }
    } catch (const std::exception& error) {
      end_process(call.call, error.what());
    }
    return true;
  });
  if (ended != 0) {
    // The host runs ahead of the device, so the time of the next call starts when the device begins
    // that call.
    wait_.reset();
  }
  // A rank that has given up has already reported why.
  if (!calls_.empty() && world_.own().state.load() == flight::RankState::kRunning) {
    look_at(calls_.front());
  }
}

/// Ends the process if the call cannot end. A rank that began the call and then ended may have done
/// its part of the call, so the device gets a moment to finish.
void Watchdog::look_at(const DeviceCall& device) {
  constexpr milliseconds kDying{1500};
  const BegunCall& call = device.call;
  if (!wait_) {
    lost_since_.reset();
    wait_.emplace(world_, device.group, call.number, world_.settings().timeout,
                  [this, call] { return beginning(world_, call); });
  }
  const auto not_begun = [&] { return world_.not_begun(*device.group, call.number); };
  const auto missing = [&] { return world_.not_in(*device.group, call.number); };
  if (const std::string lost = wait_->why_lost(not_begun); !lost.empty()) {
    end_process(call, lost);
  }
  if (const std::string lost = wait_->why_lost(missing); !lost.empty()) {
    lost_since_ = lost_since_.value_or(steady_clock::now());
    if (steady_clock::now() - *lost_since_ >= kDying) {
      end_process(call, lost);
    }
  }
  if (const std::string late = wait_->why_late(missing); !late.empty()) {
    end_process(call, late);
  }
}

void Watchdog::end_process(const BegunCall& call, const std::string& why) const {
  if (world_.first_to_end(ranks_of_world(world_.own().size))) {
    wait_for_first_failure();
  }
  // The line is written in one call, because several ranks write to the same terminal.
  std::fputs(
      ("error: " + beginning(world_, call) + why + "\n" + write_device_record(world_)).c_str(),
      stderr);
  world_.give_up();
  std::_Exit(EXIT_FAILURE);
}

}  // namespace tessera::comm
