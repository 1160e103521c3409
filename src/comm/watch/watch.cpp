#include "watch/watch.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>
#include <limits>
#include <new>
#include <sstream>

#include "host/host.h"
#include "host/shared_file.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using flight::RankState;
using flight::Record;
using std::chrono::milliseconds;

/// The topic under which a rank's end is announced. For waits, the topic is the process group's id.
constexpr auto kEnd = "end";
constexpr auto kAnnouncements = "announcements";

std::int64_t unix_time_ns() {
  return std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

RecordPtr make_record(const WatchSettings& settings, int size, const std::string& folder) {
  constexpr mode_t kMode = 0644;
  const std::string path =
      folder.empty() ? "" : folder + "/" + flight::record_name(settings.world, settings.rank);
  // Removes an older file instead of truncating it: SIGBUS would end a process that still maps a
  // truncated file.
  unlink(path.c_str());
  const int fd = path.empty() ? memfd_create("tessera-record", MFD_CLOEXEC)
                              : ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, kMode);
  // Reserves the disk space: if the disk is full, SIGBUS would end the process at a write to the
  // mapped file.
  const int error = fd < 0 ? errno : posix_fallocate(fd, 0, sizeof(Record));
  const SharedFile file = error == 0 ? map_file(fd) : SharedFile{};
  if (file.base == nullptr) {
    fail("the flight record ", path, " cannot be made: ", std::strerror(error == 0 ? errno : error),
         "; set TESSERA_RUN_DIR to a writable folder");
  }
  auto* const record = new (file.base.get()) Record;
  const ProcessIdentity process = this_process();
  record->rank = settings.rank;
  record->size = size;
  record->pid = process.pid;
  record->start_time = process.start_time;
  record->fd = fd;
  record->magic.store(flight::kMagic, std::memory_order_release);
  return {file.base, record};
}

RecordPtr open_record(const std::string& handle) {
  const SharedFile file = open_file(handle);
  auto* const record = static_cast<Record*>(file.base.get());
  // Another version of Tessera, with another format of records, can have written the file.
  return file.bytes == sizeof(Record) && record->magic == flight::kMagic
             ? RecordPtr(file.base, record)
             : nullptr;
}

/// Records how this rank ends. Only the first call has an effect, so the first failure is recorded.
void WorldWatch::note_end(RankState state) {
  auto running = RankState::kRunning;
  std::int64_t never = 0;
  own().ended.compare_exchange_strong(never, unix_time_ns());
  if (own().state.compare_exchange_strong(running, state)) {
    announce(settings_.rank, kEnd, what_it_does(settings_.rank));
  }
}

std::uint64_t WorldWatch::add_group(const std::string& name, const std::vector<int>& ranks) {
  // Group ids begin at 1, because 0 marks an unused element of `groups`.
  const auto id = std::max<std::uint64_t>(hash_of(name + " of " + join(ranks)), 1);
  const std::lock_guard lock(writes_);
  auto* const slot = std::ranges::find_if(
      own().groups, [id](const flight::GroupSlot& each) { return each.id == 0 || each.id == id; });
  if (slot != own().groups.end() && slot->id == 0) {
    for (const int rank : ranks) {
      const auto bit = static_cast<std::size_t>(rank);
      if (bit < flight::kMostRanks) {
        slot->ranks[bit / 64] |= std::uint64_t{1} << (bit % 64);
      }
    }
    slot->id.store(id, std::memory_order_release);
  }
  return id;
}

void WorldWatch::note(const BegunCall& call, bool waits) {
  const std::lock_guard lock(writes_);
  flight::GroupSlot* const slot = flight::find_group(own(), call.group);
  const bool is_last = slot != nullptr && slot->begun != 0 && slot->number == call.number;
  // The end of `call` is not recorded if the group's record already describes a later call.
  if (slot == nullptr || (is_last ? slot->waits == waits : !waits)) {
    return;
  }
  if (!is_last) {
    slot->call.store(call.text);
    slot->number = call.number;
  }
  slot->since = unix_time_ns();
  slot->waits = waits;
  slot->begun.store(std::max(slot->begun.load(), call.number + 1), std::memory_order_release);
}

std::vector<int> WorldWatch::away(std::vector<int> ranks) const {
  std::erase_if(ranks, [this](int rank) { return record_of(rank) != nullptr; });
  return ranks;
}

bool WorldWatch::has_ended(int rank) {
  if (const RecordPtr& record = record_of(rank)) {
    return record->state != RankState::kRunning || !is_alive({record->pid, record->start_time});
  }
  const std::lock_guard lock(mutex_);
  return announced_.contains({rank, kEnd});
}

std::vector<int> WorldWatch::not_in(const BegunCall& call) {
  std::vector<int> ranks = flight::ranks_of(own(), call.group);
  std::erase_if(ranks, [&](int rank) {
    const RecordPtr& record = record_of(rank);
    if (record != nullptr && !flight::has_begun(*record, call.group, call.number)) {
      return false;
    }
    // An ended rank is not missing if it began the collective and ended without an error.
    return !has_ended(rank) || (record != nullptr && record->state == RankState::kEnded);
  });
  return ranks;
}

std::optional<int> WorldWatch::first_to_end(std::vector<int> ranks) {
  read_announcements();
  std::erase_if(ranks, [this](int rank) { return !has_ended(rank); });
  // A killed process has `ended` == 0 and therefore is first: it is probably the original cause.
  const auto first = std::ranges::min_element(ranks, {}, [this](int rank) {
    const RecordPtr& record = record_of(rank);
    return record == nullptr ? std::numeric_limits<std::int64_t>::max() : record->ended.load();
  });
  return first == ranks.end() ? std::nullopt : std::optional(*first);
}

std::string WorldWatch::what_it_does(int rank) {
  if (record_of(rank) == nullptr) {
    const std::lock_guard lock(mutex_);
    const auto end = announced_.find({rank, kEnd});
    return end != announced_.end() ? end->second
                                   : detail::concat("rank ", rank, " is on another host");
  }
  const Record& record = *record_of(rank);
  const bool alive = is_alive({record.pid, record.start_time});
  const RankState state = record.state;
  return detail::concat("rank ", rank, " ", flight::what_it_does(record, alive),
                        state == RankState::kEnded
                            ? "; every rank must make this call before World::shutdown()"
                        : state == RankState::kGaveUp || !alive ? "; look for its error"
                                                                : "");
}

void WorldWatch::announce(int rank, const std::string& topic, const std::string& text) {
  constexpr std::chrono::seconds kPatience{1};
  if (store_ == nullptr || record_of(rank) == nullptr) {
    return;
  }
  const std::string line = detail::concat(rank, " ", topic, " ", text);
  ask(store_, [bytes = std::vector<std::uint8_t>(line.c_str(), line.c_str() + line.size() + 1)](
                  detail::Store& store) {
    store.append(kAnnouncements, bytes);
    return store.check({kAnnouncements});  // waits until append() is complete
  }).wait_for(kPatience);
}

/// Reads all ranks' announcements from the store without blocking. One call sends a request; a
/// later call reads the answer.
void WorldWatch::read_announcements() {
  constexpr std::chrono::milliseconds kBetweenQuestions{500};
  const std::lock_guard lock(mutex_);
  if (asked_.valid() && asked_.wait_for(milliseconds(0)) == std::future_status::ready) {
    try {
      std::istringstream all(asked_.get());
      std::string topic;
      std::string text;
      for (int rank = 0; all >> rank >> topic >> std::ws && std::getline(all, text, '\0');) {
        announced_[{rank, topic}] = text;
      }
    } catch (const std::exception&) {
      // The process that serves the store has ended. The other ranks notice this without an
      // announcement.
    }
  }
  const auto now = std::chrono::steady_clock::now();
  if (store_ != nullptr && !asked_.valid() && now >= next_question_) {
    next_question_ = now + kBetweenQuestions;
    asked_ = ask(store_, [](detail::Store& store) {
      return store.check({kAnnouncements}) ? store.get_to_str(kAnnouncements) : std::string();
    });
  }
}

std::vector<int> WorldWatch::not_waiting(const BegunCall& call) {
  std::vector<int> ranks = away(flight::ranks_of(own(), call.group));
  const std::lock_guard lock(mutex_);
  std::erase_if(ranks, [&](int rank) {
    const auto wait = announced_.find({rank, std::to_string(call.group)});
    return announced_.contains({rank, kEnd}) ||
           (wait != announced_.end() && std::stoull(wait->second) >= call.number);
  });
  return ranks;
}

BegunCall GroupWatch::begin(std::string collective, std::string_view purpose) {
  const std::uint64_t number = begun_++;
  const std::string_view caller = CallerScope::outermost();
  std::string text = std::move(collective);
  text.append(purpose.empty() ? "" : " for ").append(purpose);
  text.append(" (call ").append(std::to_string(number)).append(" of group '").append(name_);
  text.append("')").append(caller.empty() ? "" : ", called by ").append(caller);
  BegunCall call{id_, number, std::move(text)};
  world_->note(call, true);
  return call;
}

namespace {

/// Returns the beginning of an error message: the collective and, if known, the public function
/// that the program has called, for example an optimizer's step.
std::string beginning(const GroupInfo& group, const std::string& collective) {
  const std::string_view caller = CallerScope::outermost();
  return describe(group, collective.c_str()) + ": " +
         (caller.empty() ? "" : detail::concat(caller, " is collective; "));
}

}  // namespace

PeerWait::PeerWait(const GroupInfo& group, const std::string& collective,
                   std::optional<std::uint64_t> number)
    : PeerWait(group.watch->world(),
               {.group = group.watch->id(), .number = number.value_or(group.watch->number())},
               group.timeout, beginning(group, collective)) {}

PeerWait::PeerWait(WorldWatch& world, BegunCall call, milliseconds timeout, std::string beginning)
    : world_(world), call_(std::move(call)), timeout_(timeout), beginning_(std::move(beginning)) {}

void PeerWait::check(std::optional<std::vector<int>> missing) {
  constexpr milliseconds kGrace{300};
  std::vector<int> absent = missing ? *std::move(missing) : world_.not_in(call_);
  const auto now = Clock::now();
  const auto waited = now - begun_;
  const auto ended = world_.first_to_end(absent);
  // An ended rank may have sent all its data. Therefore its end is an error only after kGrace.
  lost_since_ = ended ? lost_since_.value_or(now) : std::optional<Clock::time_point>();
  if (ended && now - *lost_since_ >= kGrace) {
    const std::string why = world_.what_it_does(*ended);
    world_.announce(*ended, kEnd, why);
    throw PeerError(beginning_ + why);
  }
  if (waited >= timeout_ / 2 && !std::exchange(announced_, true)) {
    world_.announce(world_.settings().rank, std::to_string(call_.group),
                    std::to_string(call_.number));
  }
  if (waited >= timeout_) {
    std::ranges::copy(world_.not_waiting(call_), std::back_inserter(absent));
    throw PeerError(beginning_ + lateness(absent));
  }
  const milliseconds limit = world_.settings().limit;
  if (limit.count() > 0 && waited >= limit && !std::exchange(reported_, true)) {
    // The line is written by one call, because several ranks write to the same terminal.
    std::fputs(("tessera watchdog: " + beginning_ + lateness(absent) + "\n").c_str(), stderr);
  }
}

std::string PeerWait::lateness(const std::vector<int>& missing) const {
  constexpr std::size_t kMost = 4;
  const std::chrono::duration<double> waited = Clock::now() - begun_;
  std::string text = (missing.empty() ? "no rank is known to be missing, but the call did not end"
                                      : "rank(s) " + join(missing) + " did not arrive") +
                     detail::concat(" for ", std::round(10 * waited.count()) / 10, " s");
  const auto described = missing.empty() ? flight::ranks_of(world_.own(), call_.group) : missing;
  for (std::size_t i = 0; i < std::min(kMost, described.size()); ++i) {
    text += (i == 0 ? ": " : "; ") + world_.what_it_does(described[i]);
  }
  return text;
}

void fail_without_peers(const GroupInfo& group, const std::string& collective,
                        const std::string& reason) {
  // When a process ends, its sockets close first. Other ranks see the end a little later on the
  // same machine, and about a second later on other machines.
  constexpr milliseconds kNap{20};
  const milliseconds dying{group.watch->world().away(group.ranks).empty() ? 600 : 2500};
  std::vector<int> peers = group.ranks;
  std::erase(peers, group.world_rank());
  PeerWait wait(group, collective);
  for (milliseconds waited{0}; waited < dying; waited += kNap) {
    wait.check(peers);
    std::this_thread::sleep_for(kNap);
  }
  throw PeerError(beginning(group, collective) + reason +
                  "; look for the first error among the other ranks");
}

void WorldWatch::end() {
  {
    const std::lock_guard lock(device_mutex_);
    ended_ = true;
  }
  ends_thread_.notify_all();
  if (device_thread_.joinable()) {
    device_thread_.join();
  }
  // The calls are destroyed without a lock, because destroying a call can destroy a World.
  added_.clear();
  calls_.clear();
  // If an exception is being thrown, the state kGaveUp makes the messages of other ranks refer to
  // the error message of this rank.
  note_end(std::uncaught_exceptions() > 0 ? RankState::kGaveUp : RankState::kEnded);
}

void WorldWatch::await_ends() {
  constexpr milliseconds kLongestNap{100};
  const auto begun = std::chrono::steady_clock::now();
  bool reported = settings_.limit.count() == 0;
  std::vector<int> running = ranks_of_world(own().size);
  for (milliseconds nap{1};; nap = std::min(2 * nap, kLongestNap)) {
    read_announcements();
    std::erase_if(running, [this](int rank) { return has_ended(rank); });
    const auto waited = std::chrono::steady_clock::now() - begun;
    if (running.empty() || waited >= settings_.timeout) {
      return;
    }
    if (waited >= settings_.limit && !std::exchange(reported, true)) {
      std::fputs(detail::concat("tessera watchdog: rank ", settings_.rank,
                                " serves the job's store, and waits for the end of rank(s) ",
                                join(running), "\n")
                     .c_str(),
                 stderr);
    }
    std::this_thread::sleep_for(nap);
  }
}

void WorldWatch::await_device(std::function<bool()> is_done, const BegunCall& call) {
  const std::lock_guard lock(device_mutex_);
  if (ended_) {
    return;
  }
  added_.push_back({std::move(is_done), call});
  if (!device_thread_.joinable()) {
    device_thread_ = std::thread([this] { watch_device(); });
  }
}

void WorldWatch::watch_device() {
  constexpr milliseconds kTick{200};
  // The program's signal handlers must not run on this thread.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  pthread_setname_np(pthread_self(), "tessera-watch");
  std::unique_lock lock(device_mutex_);
  while (!ends_thread_.wait_for(lock, kTick, [this] { return ended_; })) {
    calls_.splice(calls_.end(), added_);
    lock.unlock();
    look_at_device();
    lock.lock();
  }
}

/// Ends the process if a collective on the GPU has failed, or waits for a rank that has ended.
void WorldWatch::look_at_device() {
  const std::string self = detail::concat(", rank ", settings_.rank, ": ");
  std::string beginning;
  try {
    const auto completed = std::erase_if(calls_, [&](const DeviceCall& device) {
      beginning = device.call.text + self;
      const bool is_done = device.is_done();
      if (is_done) {
        note(device.call, false);
      }
      return is_done;
    });
    if (completed != 0) {
      // The time-out of the next call starts here: the GPU begins a call only when the previous
      // call is complete, long after the CPU has queued the call.
      wait_.reset();
    }
    if (!calls_.empty() && own().state == RankState::kRunning) {
      const BegunCall& call = calls_.front().call;
      note(call, true);
      if (!wait_) {
        wait_.emplace(*this, call, settings_.timeout, call.text + self);
      }
      beginning.clear();
      wait_->check();
    }
  } catch (const std::exception& error) {
    if (first_to_end(ranks_of_world(own().size))) {
      wait_for_first_failure();
    }
    std::fputs(("error: " + beginning + error.what() + "\n").c_str(), stderr);
    give_up();
    std::_Exit(EXIT_FAILURE);
  }
}

namespace {

/// Calls `question(store)` until its result has a value, and checks the other ranks between calls.
template <class Question>
auto answer_of(const detail::StorePtr& store, const GroupInfo& group, const Question& question) {
  constexpr std::chrono::microseconds kLongestNap{100'000};
  PeerWait wait(group, "set-up");
  for (std::chrono::microseconds nap{200};; nap = std::min(2 * nap, kLongestNap)) {
    auto asked = ask(store, question);
    for (; asked.wait_for(nap) != std::future_status::ready; nap = std::min(2 * nap, kLongestNap)) {
      wait.check();
    }
    if (const auto answer = asked.get()) {
      return *answer;
    }
    wait.check();
    std::this_thread::sleep_for(nap);
  }
}

}  // namespace

void meet(const detail::StorePtr& store, const GroupInfo& group) {
  const auto key_of = [](int rank) { return "here/" + std::to_string(rank); };
  std::vector<std::string> keys;
  std::ranges::transform(group.ranks, std::back_inserter(keys), key_of);
  tell(store, group, key_of(group.world_rank()), "");
  answer_of(store, group, [keys](detail::Store& asked) {
    return asked.check(keys) ? std::optional(true) : std::nullopt;
  });
}

bool all_come_at_once(const detail::StorePtr& world, const detail::StorePtr& own,
                      const GroupInfo& group, int world_size, const std::string& meeting) {
  constexpr auto kAnswer = "answer";
  // The first rank of each group calls decide(). The decision that reaches the store first counts.
  const auto decide = [size = group.size(), world_size, meeting](detail::Store& store) {
    const std::string decision = meeting + "/decision";
    // Each rank calls this function with one group, so the groups are disjoint. All groups have
    // arrived when the arrived ranks add up to the size of the World.
    const bool last = store.add(meeting + "/arrived", size) == world_size;
    const auto begun = std::chrono::steady_clock::now();
    while (!last && !store.check({decision}) &&
           std::chrono::steady_clock::now() - begun < milliseconds(2000)) {
      std::this_thread::sleep_for(milliseconds(5));
    }
    return std::optional(
        store.compareSet(decision, std::string(), std::string(last ? "together" : "alone")));
  };
  if (group.rank == 0) {
    tell(own, group, kAnswer, answer_of(world, group, decide));
  }
  return value_of(own, group, kAnswer) == "together";
}

std::string value_of(const detail::StorePtr& store, const GroupInfo& group,
                     const std::string& key) {
  return answer_of(store, group, [key](detail::Store& asked) {
    return asked.check({key}) ? std::optional(asked.get_to_str(key)) : std::nullopt;
  });
}

void tell(const detail::StorePtr& store, const GroupInfo& group, const std::string& key,
          const std::string& value) {
  answer_of(store, group, [key, value](detail::Store& asked) {
    asked.set(key, value);
    return std::optional(true);
  });
}

}  // namespace tessera::comm
