#include "watch/watchdog.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <utility>

#include "group_info.h"
#include "host/host.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/rank_threads.h"
#include "tessera/core/atomic_file.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTick{200};
/// How long a report waits for the answers of other hosts.
constexpr milliseconds kAnswerTime{3000};

std::int64_t nanoseconds(milliseconds duration) {
  return std::chrono::nanoseconds(duration).count();
}

/// Written in one call, because several ranks write to the same terminal.
void say(const std::string& text) {
  std::fputs((text + "\n").c_str(), stderr);
}

std::string seconds_text(std::int64_t since) {
  constexpr double kNanosecondsPerSecond = 1e9;
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s",
                static_cast<double>(flight::now() - since) / kNanosecondsPerSecond);
  return text;
}

/// Blocks all signals on this thread, so that the program's signal handlers do not run on it.
void block_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

bool is_over(flight::CallState state) {
  return state == flight::CallState::kDone || state == flight::CallState::kFailed;
}

/// The call with this order in the record; only its order if the record no longer contains it.
flight::Call call_of(const flight::Record& record, std::uint64_t order) {
  const flight::RankReport own = flight::read(record);
  const auto found = std::ranges::find(own.calls, order, &flight::Call::order);
  return found == own.calls.end()
             ? flight::Call{.order = order, .group_name = "", .collective = "a collective"}
             : *found;
}

/// Whether a call may have been waiting since before `time`. Cheap enough for every tick, unlike
/// read().
bool any_waits_since(const flight::Record& record, std::int64_t time) {
  return std::ranges::any_of(record.calls, [time](const flight::CallSlot& slot) {
    return slot.state.load(std::memory_order_acquire) == flight::CallState::kWaiting &&
           slot.waits_since.load(std::memory_order_relaxed) < time;
  });
}

std::vector<int> missing_from(const flight::Call& call,
                              const std::vector<flight::RankReport>& reports, int rank) {
  const flight::RankReport* own = flight::find_rank(reports, rank);
  return own == nullptr ? std::vector<int>() : flight::missing_ranks(reports, *own, call);
}

}  // namespace

Watchdog::~Watchdog() {
  stop();
}

void Watchdog::stop() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
  // The device calls are destroyed after the lock is released, because destroying them may end a
  // world, which takes the lock again.
  std::vector<DeviceWork> left;
  const std::lock_guard lock(mutex_);
  left.swap(devices_);
}

void Watchdog::start() {
  const std::lock_guard lock(mutex_);
  if (watch_.settings().limit.count() > 0 || watch_.remote() != nullptr) {
    start_thread();
  }
}

/// The caller must hold the lock.
void Watchdog::start_thread() {
  if (!thread_.joinable() && !stops_) {
    thread_ = std::thread([this] { run(); });
  }
}

void Watchdog::await_device(std::function<bool()> progress, const BegunCall& call) {
  add({std::move(progress), call, /*ends_call=*/true});
}

void Watchdog::await_thread(std::shared_ptr<const std::atomic<bool>> returned,
                            const BegunCall& call) {
  add({[returned = std::move(returned)] { return returned->load(); }, call, /*ends_call=*/false});
}

void Watchdog::add(DeviceWork work) {
  const std::lock_guard lock(mutex_);
  if (stops_) {
    return;
  }
  start_thread();
  devices_.push_back(std::move(work));
}

void Watchdog::run() {
  block_signals();
  pthread_setname_np(pthread_self(), "tessera-watch");
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kTick, [this] { return stops_; })) {
    lock.unlock();
    tick();
    lock.lock();
  }
}

void Watchdog::tick() {
  answer_questions();
  tell_of_work();
  look_at_devices();
  look_at_peers();
  look_at_waits();
}

void Watchdog::answer_questions() {
  if (watch_.remote() == nullptr || watch_.remote()->asked() <= answered_) {
    return;
  }
  answered_ = watch_.remote()->asked();
  const std::vector<flight::RankReport> reports = watch_.observe();
  for (const flight::RankReport& report : reports) {  // includes ranks that cannot answer
    watch_.remote()->answer(answered_, report.rank, flight::what_it_does(report, reports));
  }
  watch_.write_records();
}

void Watchdog::tell_of_work() {
  std::int64_t last = told_of_work_;
  for (const flight::ThreadSlot& thread : watch_.own().threads) {
    last = std::max(last, thread.worked.load(std::memory_order_acquire));
  }
  if (watch_.remote() != nullptr && last > told_of_work_) {
    told_of_work_ = last;
    watch_.remote()->tell_of_work();
  }
}

void Watchdog::look_at_devices() {
  std::uint64_t failed = 0;
  std::string why;
  std::vector<DeviceWork> ended;  // destroyed after the lock is released: see stop()
  {
    const std::lock_guard lock(mutex_);
    const auto first =
        std::stable_partition(devices_.begin(), devices_.end(), [&](const DeviceWork& device) {
          bool done = false;
          try {
            done = device.is_done();
          } catch (const std::exception& error) {
            if (failed == 0) {
              failed = device.call.order;
              why = error.what();
            }
          }
          if (done && device.ends_call) {
            mark_ended(watch_.own(), device.call, flight::CallState::kDone);
          }
          return !done;
        });
    std::move(first, devices_.end(), std::back_inserter(ended));
    devices_.erase(first, devices_.end());
    if (!ended.empty()) {
      // The host runs ahead of the device, so a call's waiting time starts when the device reaches
      // it.
      for (const DeviceWork& device : devices_) {
        restart_wait(watch_.own(), device.call);
      }
      stuck_since_ = 0;
    }
  }
  if (failed != 0) {
    end_process(call_of(watch_.own(), failed), why);
  }
}

/// Checks the other ranks for a call on the device, which would wait forever for a dead rank.
void Watchdog::look_at_peers() {
  std::uint64_t first = 0;
  {
    const std::lock_guard lock(mutex_);
    first = devices_.empty() ? 0 : devices_.front().call.order;
  }
  // A rank that has given up has already reported why.
  if (first == 0 || watch_.own().state.load() != flight::RankState::kRunning) {
    return;
  }
  if (!watch_.first_to_end(ranks_of_world(watch_.own().size))) {
    return;
  }
  const flight::Call call = call_of(watch_.own(), first);
  const std::string why = why_stuck(call, watch_.reports());
  if (!why.empty()) {
    end_process(call, why);
  }
}

/// Why the call cannot end; "" if it still may. A rank that began the call and ended without an
/// error has done its part. A rank that died may have done its part, so the device gets a moment to
/// finish.
std::string Watchdog::why_stuck(const flight::Call& call, const Reports& reports) {
  constexpr milliseconds kDying{2000};
  const flight::RankReport* own = flight::find_rank(reports, watch_.settings().rank);
  const flight::Group* group = own == nullptr ? nullptr : own->find_group(call.group);
  if (group == nullptr) {
    return "";
  }
  const std::vector<int> missing = flight::missing_ranks(reports, *own, call);
  for (const int rank : missing) {
    if (!watch_.may_come(rank)) {
      return watch_.exit_reason(rank);
    }
  }
  for (const int rank : group->ranks) {
    const flight::RankReport* peer = flight::find_rank(reports, rank);
    const bool ended_well =
        peer != nullptr && peer->exit_code == 0 &&
        (peer->state == flight::RankState::kEnded || peer->state == flight::RankState::kExited);
    if (rank != watch_.settings().rank && !ended_well && !watch_.may_come(rank)) {
      const std::int64_t now = flight::now();
      stuck_since_ = stuck_since_ == 0 ? now : stuck_since_;
      return now - stuck_since_ < nanoseconds(kDying) ? "" : watch_.exit_reason(rank);
    }
  }
  return "";
}

void Watchdog::look_at_waits() {
  const bool reports = watch_.settings().limit.count() > 0;
  const std::int64_t latest =
      flight::now() - nanoseconds(reports ? watch_.settings().limit : watch_.settings().timeout);
  if (reported_.empty() && !any_waits_since(watch_.own(), latest)) {
    return;
  }
  const flight::RankReport own = flight::read(watch_.own());
  for (const flight::Call& call : own.calls) {
    const auto reported = reported_.find(call.order);
    if (reported != reported_.end() && is_over(call.state)) {
      say_that_it_ended(call, reported->second);
      reported_.erase(reported);
    } else if (call.state == flight::CallState::kWaiting && call.waits_since < latest &&
               last_work_for(call) < latest) {
      if (reports && reported == reported_.end()) {
        report(call);
      }
      end_if_late(call);
    }
  }
}

/// The last time at which a rank that the call waits for made progress with files.
std::int64_t Watchdog::last_work_for(const flight::Call& call) const {
  const Reports reports = watch_.reports();
  std::int64_t last = watch_.remote() == nullptr ? 0 : watch_.remote()->last_work();
  for (const int rank : missing_from(call, reports, watch_.settings().rank)) {
    last = std::max(last, flight::last_work(*flight::find_rank(reports, rank), call.group));
  }
  return last;
}

/// Whether a lower rank waits in the same call and so reports it.
bool Watchdog::reports_for_others(const flight::Call& call,
                                  const std::vector<flight::RankReport>& reports) const {
  for (const flight::RankReport& report : reports) {
    const bool waits = std::ranges::any_of(report.calls, [&](const flight::Call& other) {
      return other.group == call.group && other.number == call.number &&
             other.state == flight::CallState::kWaiting;
    });
    if (report.rank < watch_.settings().rank && waits && watch_.may_come(report.rank) &&
        !watch_.is_stopped(report.rank)) {
      return false;
    }
  }
  return watch_.remote() == nullptr ||
         watch_.remote()->claim(std::to_string(call.group) + "/" + std::to_string(call.number));
}

void Watchdog::report(const flight::Call& call) {
  const WatchSettings& settings = watch_.settings();
  Reported& reported = reported_[call.order];
  if (!reports_for_others(call, watch_.reports())) {
    return;
  }
  const std::int64_t question = watch_.remote() == nullptr ? 0 : watch_.remote()->ask();
  const std::vector<flight::RankReport> reports = watch_.observe();
  const std::vector<int> missing = missing_from(call, reports, settings.rank);
  std::string text = "tessera watchdog: rank " + std::to_string(settings.rank) + " waits since " +
                     seconds_text(call.waits_since) + " in " + flight::to_text(call) +
                     (missing.empty() ? "" : ", for " + flight::name_ranks(missing));
  for (const std::string& line : flight::explain(reports, flight::now())) {
    text += "\n  " + line;
  }
  watch_.write_records();
  say(text + "\n  what the ranks did last: tessera-run --explain " + settings.folder);
  reported = {call.waits_since, missing};
  for (const std::string& line : watch_.answers_of_other_hosts(question, kAnswerTime)) {
    say("tessera watchdog: " + line);
  }
}

void Watchdog::say_that_it_ended(const flight::Call& call, const Reported& reported) const {
  if (call.state == flight::CallState::kDone && reported.since != 0) {
    say("tessera watchdog: " +
        (reported.missing.empty() ? "the peers" : flight::name_ranks(reported.missing)) +
        " came to " + flight::to_text(call) + " after " + seconds_text(reported.since) +
        ": slow, not stuck; the job continues");
  }
}

/// Ends the process if the call is past the time-out. A thread that waits on the host throws at the
/// time-out; a call that waits for the device cannot.
void Watchdog::end_if_late(const flight::Call& call) {
  const WatchSettings& settings = watch_.settings();
  const std::int64_t since = std::max(call.waits_since, last_work_for(call));
  if (flight::now() - since < nanoseconds(settings.timeout) || !is_on_device(call)) {
    return;
  }
  const std::string limit = " within " + std::to_string(settings.timeout.count()) + " ms";
  const std::vector<int> missing = missing_from(call, watch_.reports(), settings.rank);
  const std::string doings = watch_.what_they_do(missing);
  end_process(call, missing.empty() ? "all ranks have come, and it did not end" + limit +
                                          "; look at the network, and at what NCCL_DEBUG=INFO shows"
                                    : "rank(s) " + join(missing) + " did not arrive" + limit +
                                          ": " + doings + advice_behind(doings));
}

bool Watchdog::is_on_device(const flight::Call& call) {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(
      devices_, [&](const DeviceWork& device) { return device.call.order == call.order; });
}

void Watchdog::end_process(const flight::Call& call, const std::string& why) const {
  const WatchSettings& settings = watch_.settings();
  if (watch_.first_to_end(ranks_of_world(watch_.own().size))) {
    wait_for_first_failure();
  }
  say("error: " + flight::to_text(call) + ", rank " + std::to_string(settings.rank) + ": " + why);
  if (watch_.device_record()) {
    // PyTorch's torchfrtrace reads files with this name.
    const std::string path = settings.folder + "/nccl_trace_rank_" + std::to_string(settings.rank);
    try {
      std::filesystem::create_directories(settings.folder);
      files::write_file(path, watch_.device_record()());
      say("tessera watchdog: NCCL's flight record is " + path);
    } catch (const std::exception&) {
      // Failures are ignored, because the error above is what matters.
    }
  }
  watch_.give_up();
  std::_Exit(EXIT_FAILURE);
}

}  // namespace tessera::comm
