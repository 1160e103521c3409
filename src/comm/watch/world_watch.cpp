#include "watch/world_watch.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <future>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <random>
#include <set>
#include <sstream>

#include "group_info.h"
#include "host/host.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/core/error.h"
#include "watch/peer_wait.h"

namespace tessera::comm {
namespace {

using flight::RankState;
using flight::Record;

constexpr auto kRecordBytes = static_cast<off_t>(sizeof(Record));

/// Maps the file of a flight record; returns nullptr on failure.
Record* map_record(int fd) {
  void* base = mmap(nullptr, sizeof(Record), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return base == MAP_FAILED ? nullptr : static_cast<Record*>(base);
}

std::int64_t unix_time_ns() {
  return std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

RecordMemory::~RecordMemory() {
  munmap(record_, sizeof(Record));
  close(fd_);
}

std::string run_folder() {
  return environment_variable("TESSERA_RUN_DIR").value_or("");
}

RecordPtr make_record(const WatchSettings& settings, int size, const std::string& folder) {
  constexpr mode_t kMode = 0644;
  std::string path =
      folder.empty() ? "" : folder + "/" + flight::record_name(settings.world, settings.rank);
  // An older file is unlinked: truncating it would end a process that still maps the file, with
  // SIGBUS.
  unlink(path.c_str());
  const int fd = path.empty() ? memfd_create("tessera-record", MFD_CLOEXEC)
                              : ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, kMode);
  // Disk space is reserved: on a full disk, a write to the mapped file would end the process with
  // SIGBUS.
  int error = fd < 0 ? errno : posix_fallocate(fd, 0, kRecordBytes);
  Record* const memory = error == 0 ? map_record(fd) : nullptr;
  if (memory == nullptr) {
    error = error == 0 ? errno : error;
    close(fd);
    fail("the flight record ", path, " cannot be made: ", std::strerror(error),
         "; give a folder that exists and can be written as TESSERA_RUN_DIR");
  }
  Record& record = *new (memory) Record;
  std::random_device random;
  const ProcessIdentity process = this_process();
  record.token = (std::uint64_t{random()} << 32) | random();
  record.bytes = sizeof(Record);
  record.rank = settings.rank;
  record.size = size;
  record.pid = process.pid;
  record.start_time = process.start_time;
  record.magic.store(flight::kMagic, std::memory_order_release);
  path = path.empty() ? detail::concat("/proc/", getpid(), "/fd/", fd) : path;
  return std::make_shared<RecordMemory>(fd, &record, detail::concat(record.token, " ", path));
}

RecordPtr open_record(const std::string& handle) {
  std::istringstream text(handle);
  std::uint64_t token = 0;
  std::string path;
  text >> token >> std::ws;
  std::getline(text, path);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat status {};
  const bool fits = fd >= 0 && fstat(fd, &status) == 0 && status.st_size == kRecordBytes;
  Record* const record = fits ? map_record(fd) : nullptr;
  if (record == nullptr) {
    close(fd);
    return nullptr;
  }
  auto opened = std::make_shared<RecordMemory>(fd, record, handle);
  // If the token differs, the path is of another pid namespace, and here it names another file.
  return record->token == token && record->magic == flight::kMagic ? opened : nullptr;
}

namespace {

constexpr std::chrono::seconds kPatience{1};
/// The store's key of the announcements that ranks have ended.
constexpr auto kEnds = "ends";

std::string wait_key(std::uint64_t group, int rank) {
  return detail::concat("wait/", group, "/", rank);
}

}  // namespace

struct WorldWatch::Remote {
  /// For each rank that has ended, the reason why it will not arrive.
  using Ends = std::map<int, std::string>;

  detail::StorePtr store;        ///< a separate connection, because a call of the store may block
  std::mutex mutex;              ///< protects the members below
  std::future<Ends> asked = {};  ///< the ranks that the last look() will find, not read yet
  std::chrono::steady_clock::time_point next_look = {};
  Ends ends = {};
  std::set<int> announced = {};  ///< ranks whose end this rank has announced
};

WorldWatch::WorldWatch(const WatchSettings& settings, std::vector<RecordPtr> records,
                       detail::StorePtr store)
    : settings_(settings),
      records_(std::move(records)),
      remote_(store == nullptr ? nullptr : new Remote{std::move(store), {}}),
      watchdog_(std::make_unique<Watchdog>(*this)) {}

WorldWatch::~WorldWatch() {
  end();
}

/// Records how this rank ends. Only the first call counts, because later failures follow from the
/// first.
void WorldWatch::note_end(RankState state) {
  auto running = RankState::kRunning;
  std::int64_t never = 0;
  own().ended.compare_exchange_strong(never, unix_time_ns());
  if (own().state.compare_exchange_strong(running, state)) {
    announce_end(settings_.rank);
  }
}

void WorldWatch::end() {
  watchdog_->stop();
  // After an exception the state is kGaveUp, so that the messages of other ranks refer to this
  // rank's error message.
  note_end(std::uncaught_exceptions() > 0 ? RankState::kGaveUp : RankState::kEnded);
}

bool WorldWatch::may_come(int rank) const {
  if (!is_near(rank)) {
    return remote_end(rank).empty();
  }
  const Record& record = memory(rank)->record();
  return record.state.load() == RankState::kRunning && is_alive({record.pid, record.start_time});
}

std::optional<int> WorldWatch::first_to_end(const std::vector<int>& ranks) const {
  std::optional<int> first;
  std::int64_t earliest = std::numeric_limits<std::int64_t>::max();
  for (const int rank : ranks) {
    if (may_come(rank)) {
      continue;
    }
    // A killed process has `ended` == 0 and so counts as first: other ranks did not cause its end.
    const std::int64_t ended = is_near(rank) ? memory(rank)->record().ended.load() : earliest;
    if (!first || ended < earliest) {
      first = rank;
      earliest = ended;
    }
  }
  return first;
}

std::string WorldWatch::exit_reason(int rank) const {
  if (!is_near(rank)) {
    return remote_end(rank);
  }
  const bool ended = memory(rank)->record().state.load() == RankState::kEnded;
  return may_come(rank) ? ""
                        : what_it_does(rank) + (ended ? "; every rank must make this call before "
                                                        "World::shutdown()"
                                                      : "");
}

std::string WorldWatch::what_it_does(int rank) const {
  const Record& record = memory(rank)->record();
  const bool running = record.state.load() == RankState::kRunning;
  if (running && !may_come(rank)) {
    return detail::concat("the process of rank ", rank, " (pid ", record.pid, ") has ended ",
                          flight::progress_text(record), "; look for its error");
  }
  // `running` excludes a rank that ended well, which LeakSanitizer may trace at its exit.
  const std::string stopped =
      running && is_stopped(record.pid)
          ? detail::concat("is stopped (by SIGSTOP, Ctrl-Z or a debugger; kill -CONT ", record.pid,
                           " lets it continue) and ")
          : "";
  return detail::concat("rank ", rank, " ", stopped, flight::what_it_does(record));
}

std::string WorldWatch::what_they_do(const std::vector<int>& ranks) const {
  constexpr int kMost = 4;
  std::string text;
  int described = 0;
  for (const int rank : ranks) {
    if (is_near(rank) && described++ < kMost) {
      text += (text.empty() ? "" : "; ") + what_it_does(rank);
    }
  }
  return text;
}

std::vector<int> WorldWatch::not_begun(const WatchedGroup& group, std::uint64_t number) const {
  const auto mine = flight::find_call(own(), group.id, number);
  const flight::CallLabel call =
      mine ? mine->label : flight::CallLabel{.group = group.id, .number = number};
  std::vector<int> ranks = group.ranks;
  std::erase_if(ranks, [&](int rank) {
    return !is_near(rank) || flight::has_begun(memory(rank)->record(), call);
  });
  return ranks;
}

std::vector<int> WorldWatch::not_in(const WatchedGroup& group, std::uint64_t number) const {
  std::vector<int> ranks = not_begun(group, number);
  for (const int rank : group.ranks) {
    // A rank that began the collective and ended without an error has completed its part.
    const bool ended_well =
        is_near(rank) && memory(rank)->record().state.load() == RankState::kEnded;
    if (!ended_well && !may_come(rank) && std::ranges::find(ranks, rank) == ranks.end()) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

std::vector<int> WorldWatch::away(const WatchedGroup& group) const {
  std::vector<int> ranks = group.ranks;
  std::erase_if(ranks, [this](int rank) { return is_near(rank); });
  return ranks;
}

void WorldWatch::announce_end(int rank) const {
  if (remote_ == nullptr || !is_near(rank)) {
    return;
  }
  {
    const std::lock_guard lock(remote_->mutex);
    if (!remote_->announced.insert(rank).second) {
      return;
    }
  }
  const std::string text = detail::concat(rank, " ", exit_reason(rank));
  // A zero byte ends each announcement. Several ranks may announce that a rank was killed.
  ask(remote_->store, [bytes = std::vector<std::uint8_t>(
                           text.c_str(), text.c_str() + text.size() + 1)](detail::Store& store) {
    store.append(kEnds, bytes);
    return store.check({kEnds});  // waits until the store has the bytes
  }).wait_for(kPatience);
}

void WorldWatch::look() const {
  if (remote_ == nullptr) {
    return;
  }
  const std::lock_guard lock(remote_->mutex);
  if (remote_->asked.valid() && arrives(remote_->asked, {})) {
    try {
      remote_->ends = remote_->asked.get();
    } catch (const std::exception&) {
      // The process that serves the store has ended, which ends the job. Each rank notices this
      // itself.
    }
  }
  const auto now = std::chrono::steady_clock::now();
  if (remote_->asked.valid() || now < remote_->next_look) {
    return;
  }
  remote_->next_look = now + kPatience;
  remote_->asked = ask(remote_->store, [](detail::Store& store) {
    Remote::Ends ends;
    std::istringstream announcements(store.check({kEnds}) ? store.get_to_str(kEnds) : "");
    for (std::string text; std::getline(announcements, text, '\0');) {
      const std::size_t space = text.find(' ');
      ends.emplace(std::stoi(text.substr(0, space)), text.substr(space + 1));
    }
    return ends;
  });
}

std::string WorldWatch::remote_end(int rank) const {
  if (remote_ == nullptr) {
    return "";
  }
  const std::lock_guard lock(remote_->mutex);
  const auto found = remote_->ends.find(rank);
  return found == remote_->ends.end() ? "" : found->second;
}

void WorldWatch::announce_wait(const WatchedGroup& group, std::uint64_t number) const {
  if (remote_ != nullptr) {
    ask(remote_->store, [key = wait_key(group.id, settings_.rank), number](detail::Store& store) {
      store.set(key, std::to_string(number));
      return true;
    });
  }
}

std::optional<std::vector<int>> WorldWatch::not_waiting(const WatchedGroup& group,
                                                        std::uint64_t number) const {
  std::vector<int> ranks = away(group);
  if (remote_ == nullptr || ranks.empty()) {
    return std::vector<int>();
  }
  auto asked = ask(remote_->store, [id = group.id, number, ranks](detail::Store& store) mutable {
    std::erase_if(ranks, [&](int rank) {
      const std::string key = wait_key(id, rank);
      return store.check({key}) && std::stoull(store.get_to_str(key)) >= number;
    });
    return ranks;
  });
  try {
    return arrives(asked, kPatience) ? std::optional(asked.get()) : std::nullopt;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

namespace {

/// Takes a free entry of the flight record for a group. With the lock, threads that make groups at
/// the same time get different entries.
flight::GroupSlot* take_slot(Record& record, const WatchedGroup& group, const std::string& name) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  auto* const slot = std::ranges::find_if(
      record.groups, [](const flight::GroupSlot& each) { return each.id.load() == 0; });
  if (slot == record.groups.end()) {
    return nullptr;
  }
  slot->name = flight::padded<sizeof slot->name>(name);
  for (const int rank : group.ranks) {
    const auto bit = static_cast<std::size_t>(rank);
    if (bit < flight::kMostRanks) {
      slot->ranks[bit / 64] |= std::uint64_t{1} << (bit % 64);
    }
  }
  slot->id.store(group.id, std::memory_order_release);
  return slot;
}

}  // namespace

void set_waits(Record& record, const BegunCall& call, bool waits) {
  flight::CallSlot& slot = record.calls[call.order % flight::kCalls];
  if (slot.order.load(std::memory_order_relaxed) == call.order) {
    slot.since.store(unix_time_ns(), std::memory_order_relaxed);
    slot.waits.store(waits, std::memory_order_release);
  }
}

GroupWatch::GroupWatch(WorldWatchPtr world, const std::string& name, const std::vector<int>& ranks)
    : world_(std::move(world)),
      // The id of the group is at least 1, because 0 marks a free entry.
      group_(std::make_shared<const WatchedGroup>(
          WatchedGroup{std::max<std::uint64_t>(hash_of(name + " of " + join(ranks)), 1), ranks})),
      slot_(take_slot(world_->own(), *group_, name)) {}

BegunCall GroupWatch::begin(const char* collective, std::string_view purpose) {
  Record& record = world_->own();
  const BegunCall call{record.calls_begun.fetch_add(1) + 1, begun_++};
  flight::CallSlot& slot = record.calls[call.order % flight::kCalls];
  // `order` is set by an exchange, so that no later write becomes visible before this write.
  slot.order.exchange(0, std::memory_order_acq_rel);
  slot.label.store(
      {.group = group_->id,
       .number = call.number,
       .collective = flight::padded<sizeof(flight::CallLabel::collective)>(collective),
       .purpose = flight::padded<sizeof(flight::CallLabel::purpose)>(purpose),
       .caller = flight::padded<sizeof(flight::CallLabel::caller)>(CallerScope::outermost())});
  slot.since.store(unix_time_ns(), std::memory_order_relaxed);
  slot.waits.store(true, std::memory_order_relaxed);
  slot.order.store(call.order, std::memory_order_release);
  if (slot_ != nullptr) {
    slot_->begun.store(begun_, std::memory_order_release);
  }
  return call;
}

void GroupWatch::await_device(std::function<bool()> is_done, const BegunCall& call) {
  // The pointer stays valid, because the WorldWatch owns the watchdog that calls the function.
  auto ends_call = [is_done = std::move(is_done), call, world = world_.get()] {
    const bool done = is_done();
    if (done) {
      set_waits(world->own(), call, false);
    }
    return done;
  };
  world_->watchdog().await(std::move(ends_call), call, group_);
}

}  // namespace tessera::comm
