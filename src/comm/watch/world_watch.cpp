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
#include <iterator>
#include <limits>
#include <mutex>
#include <new>
#include <random>
#include <set>
#include <sstream>

#include "host/host.h"
#include "tessera/core/error.h"
#include "watch/store_sync.h"
#include "watch/watchdog.h"

namespace tessera::comm {
namespace {

using flight::RankState;
using flight::Record;

constexpr std::size_t kRecordBytes = sizeof(Record);

Record* map_record(int fd) {
  void* base = mmap(nullptr, kRecordBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return base == MAP_FAILED ? nullptr : static_cast<Record*>(base);
}

int make_memory(const std::string& path) {
  constexpr mode_t kMode = 0644;
  // An older file is unlinked and not truncated, because truncation would end, with SIGBUS, a
  // process that still maps the file.
  unlink(path.c_str());
  const int fd = path.empty() ? memfd_create("tessera-record", MFD_CLOEXEC)
                              : ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, kMode);
  // The disk space is reserved, because on a full disk a write to the mapped memory would otherwise
  // end the process with SIGBUS.
  const int error = fd < 0 ? errno : posix_fallocate(fd, 0, static_cast<off_t>(kRecordBytes));
  if (error != 0) {
    close(fd);
    fail("the flight record ", path, " cannot be made: ", std::strerror(error),
         "; give a folder that exists and can be written as TESSERA_RUN_DIR");
  }
  return fd;
}

}  // namespace

RecordMemory::~RecordMemory() {
  munmap(record_, kRecordBytes);
  close(fd_);
}

RecordPtr RecordMemory::create(const std::string& path) {
  const int fd = make_memory(path);
  Record* memory = map_record(fd);
  TESSERA_CHECK(memory != nullptr, "the flight record cannot be mapped: ", std::strerror(errno));
  RecordPtr made(new RecordMemory(fd, new (memory) Record));
  std::random_device random;
  memory->token = (std::uint64_t{random()} << 32) | random();
  memory->bytes = kRecordBytes;
  const std::string place =
      path.empty() ? "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd) : path;
  made->handle_ = std::to_string(memory->token) + " " + place;
  return made;
}

RecordPtr RecordMemory::open(const std::string& handle) {
  std::istringstream text(handle);
  std::uint64_t token = 0;
  std::string path;
  text >> token >> std::ws;
  std::getline(text, path);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat status {};
  const bool fits =
      fd >= 0 && fstat(fd, &status) == 0 && status.st_size == static_cast<off_t>(kRecordBytes);
  Record* record = fits ? map_record(fd) : nullptr;
  if (record == nullptr) {
    close(fd);
    return nullptr;
  }
  RecordPtr opened(new RecordMemory(fd, record));
  opened->handle_ = handle;
  // Another token means another pid namespace, in which the pid belongs to another process.
  return record->token == token && record->magic == flight::kMagic ? opened : nullptr;
}

std::string run_folder() {
  return environment_variable("TESSERA_RUN_DIR").value_or("");
}

std::int64_t unix_time() {
  return std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

RecordPtr make_record(const WatchSettings& settings, int size, const std::string& folder) {
  RecordPtr memory = RecordMemory::create(
      folder.empty() ? "" : folder + "/" + flight::record_name(settings.world, settings.rank));
  Record& record = memory->record();
  const ProcessIdentity process = this_process();
  record.rank = settings.rank;
  record.size = size;
  record.pid = process.pid;
  record.start_time = process.start_time;
  record.magic.store(flight::kMagic, std::memory_order_release);
  return memory;
}

namespace {

constexpr std::chrono::seconds kPatience{1};
constexpr auto kEnds = "ends";

std::string end_key(std::size_t number) {
  return "end/" + std::to_string(number);
}

std::string wait_key(std::uint64_t group, int rank) {
  return detail::concat("wait/", group, "/", rank);
}

}  // namespace

struct WorldWatch::Remote {
  /// Ranks that have ended, each with the reason why it will not arrive. Several ranks may announce
  /// that a rank was killed.
  using Ends = std::vector<std::pair<int, std::string>>;

  detail::StorePtr store;        ///< a separate connection, because a call of the store may block
  std::mutex mutex;              ///< protects the members below
  std::future<Ends> asked = {};  ///< the store's answer to the last look(), not read yet
  std::chrono::steady_clock::time_point next_look = {};
  Ends ends = {};
  /// The numbers of the announcements that this rank has read.
  std::shared_ptr<std::set<std::size_t>> seen = std::make_shared<std::set<std::size_t>>();
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

Record& WorldWatch::own() const {
  return memory(settings_.rank)->record();
}

/// Records how this rank ends. Only the first call counts, because later ends are a consequence of
/// the first.
void WorldWatch::note_end(RankState state) {
  auto running = RankState::kRunning;
  std::int64_t never = 0;
  own().ended.compare_exchange_strong(never, unix_time());
  if (own().state.compare_exchange_strong(running, state)) {
    announce_end(settings_.rank);
  }
}

void WorldWatch::announce_end(int rank) const {
  if (remote_ != nullptr && is_near(rank)) {
    const auto announce = [text =
                               detail::concat(rank, " ", exit_reason(rank))](detail::Store& store) {
      store.set(end_key(static_cast<std::size_t>(store.add(kEnds, 1))), text);
      return true;
    };
    ask(remote_->store, announce).wait_for(kPatience);
  }
}

void WorldWatch::end() {
  watchdog_->stop();
  // If an exception destroys the world, this rank counts as a rank that gave up, so that the
  // messages of other ranks refer to the message of the exception.
  note_end(std::uncaught_exceptions() > 0 ? RankState::kGaveUp : RankState::kEnded);
}

void WorldWatch::give_up() {
  note_end(RankState::kGaveUp);
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
    // A killed process has recorded no time of its end, and did not end because of other ranks.
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
  // A rank that ended well may be traced at its exit, such as by LeakSanitizer.
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
    // A rank that began the call and ended without an error has completed its part of the call.
    const bool ended_well =
        is_near(rank) && memory(rank)->record().state.load() == RankState::kEnded;
    if (!ended_well && !may_come(rank) && std::ranges::find(ranks, rank) == ranks.end()) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

void WorldWatch::look() const {
  if (remote_ == nullptr) {
    return;
  }
  const std::lock_guard lock(remote_->mutex);
  if (remote_->asked.valid() && arrives(remote_->asked, {})) {
    try {
      std::ranges::move(remote_->asked.get(), std::back_inserter(remote_->ends));
    } catch (const std::exception&) {
      // The store does not answer: the process that serves the store has ended, and the job with
      // it. Each rank notices this itself.
    }
  }
  const auto now = std::chrono::steady_clock::now();
  if (remote_->asked.valid() || now < remote_->next_look) {
    return;
  }
  remote_->next_look = now + kPatience;
  remote_->asked = ask(remote_->store, [seen = remote_->seen](detail::Store& store) {
    Remote::Ends found;
    const auto count = static_cast<std::size_t>(store.add(kEnds, 0));
    for (std::size_t i = 1; i <= count; ++i) {
      // A rank that was killed between counting its announcement and writing the text leaves a
      // number without a text.
      if (seen->contains(i) || !store.check({end_key(i)})) {
        continue;
      }
      seen->insert(i);
      const std::string text = store.get_to_str(end_key(i));
      const std::size_t space = text.find(' ');
      found.emplace_back(std::stoi(text.substr(0, space)), text.substr(space + 1));
    }
    return found;
  });
}

std::string WorldWatch::remote_end(int rank) const {
  if (remote_ == nullptr) {
    return "";
  }
  const std::lock_guard lock(remote_->mutex);
  const auto found = std::ranges::find(remote_->ends, rank, &Remote::Ends::value_type::first);
  return found == remote_->ends.end() ? "" : found->second;
}

std::vector<int> WorldWatch::away(const WatchedGroup& group) const {
  std::vector<int> ranks = group.ranks;
  std::erase_if(ranks, [this](int rank) { return is_near(rank); });
  return ranks;
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

}  // namespace tessera::comm
