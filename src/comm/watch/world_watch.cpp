#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <filesystem>
#include <limits>
#include <mutex>
#include <new>
#include <random>
#include <set>
#include <span>
#include <sstream>
#include <thread>

#include "host/host.h"
#include "tessera/core/atomic_file.h"
#include "tessera/core/detail/flight_record.h"
#include "tessera/core/error.h"
#include "watch/watchdog.h"
#include "watch/world_watch.h"

namespace tessera::comm {
namespace {

constexpr std::size_t kRecordBytes = sizeof(flight::Record);

flight::Record* map_record(int fd) {
  void* base = mmap(nullptr, kRecordBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return base == MAP_FAILED ? nullptr : static_cast<flight::Record*>(base);
}

int make_memory(const std::string& path) {
  constexpr mode_t kMode = 0644;
  // An older file is unlinked and not truncated, because truncation would end a process that still
  // maps it with SIGBUS.
  unlink(path.c_str());
  const int fd = path.empty() ? memfd_create("tessera-record", MFD_CLOEXEC)
                              : ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, kMode);
  // The disk space is reserved, because a full disk would otherwise end the process with SIGBUS at
  // a write to the memory.
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
  flight::Record* memory = map_record(fd);
  TESSERA_CHECK(memory != nullptr, "the flight record cannot be mapped: ", std::strerror(errno));
  RecordPtr made(new RecordMemory(fd, new (memory) flight::Record));
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
  flight::Record* record =
      fd >= 0 && fstat(fd, &status) == 0 && status.st_size == static_cast<off_t>(kRecordBytes)
          ? map_record(fd)
          : nullptr;
  if (record == nullptr) {
    close(fd);
    return nullptr;
  }
  RecordPtr opened(new RecordMemory(fd, record));
  opened->handle_ = handle;
  // Another token means another pid namespace, in which the pid belongs to another process.
  return record->token == token && record->magic == flight::kMagic ? opened : nullptr;
}

namespace {

/// A thread of a process on this host; `thread` 0 means the process's first thread.
struct WatchedThread {
  std::int64_t pid = 0;
  std::uint64_t start_time = 0;  ///< of the process, see ProcessIdentity
  std::int64_t thread = 0;
};

using flight::Activity;

constexpr std::chrono::milliseconds kBetweenLooks{250};
/// A thread that computed for more than this fraction of the time is not asleep.
constexpr double kBusy = 0.1;

double busy_part(std::uint64_t ticks) {
  const double seconds = static_cast<double>(ticks) / static_cast<double>(sysconf(_SC_CLK_TCK));
  return seconds / std::chrono::duration<double>(kBetweenLooks).count();
}

std::optional<ThreadStatus> look_at(const WatchedThread& thread) {
  if (!is_alive({thread.pid, thread.start_time})) {
    return std::nullopt;
  }
  const auto status = thread_status(thread.pid, thread.thread == 0 ? thread.pid : thread.thread);
  // The thread that communicated last may have ended while the process continues, so the first
  // thread is read instead.
  return status ? status : thread_status(thread.pid, thread.pid);
}

Activity compare(const std::optional<ThreadStatus>& before,
                 const std::optional<ThreadStatus>& after) {
  if (!after) {
    return Activity::kGone;
  }
  if (after->state == 'T' || after->state == 't') {
    return Activity::kStopped;
  }
  const std::uint64_t ticks = before ? after->cpu_ticks - before->cpu_ticks : 0;
  return after->state == 'R' || busy_part(ticks) > kBusy ? Activity::kRuns : Activity::kSleeps;
}

/// The activity of each thread, from two readings of /proc a quarter of a second apart.
std::vector<Activity> observe_threads(const std::vector<WatchedThread>& threads) {
  std::vector<std::optional<ThreadStatus>> before;
  for (const WatchedThread& thread : threads) {
    before.push_back(look_at(thread));
  }
  std::this_thread::sleep_for(kBetweenLooks);
  std::vector<Activity> result;
  for (std::size_t i = 0; i < threads.size(); ++i) {
    result.push_back(compare(before[i], look_at(threads[i])));
  }
  return result;
}

using flight::RankState;
using flight::Record;

constexpr std::chrono::milliseconds kPoll{20};

/// Records the end of a rank. Only the first end counts, because later ones are its consequence.
bool note_end(Record& record, RankState state) {
  auto running = RankState::kRunning;
  std::int64_t never = 0;
  record.ended.compare_exchange_strong(never, flight::now());
  return record.state.compare_exchange_strong(running, state);
}

/// The records of this process's ranks; they receive the exit status when the process calls exit().
class OwnRecords {
 public:
  static OwnRecords& instance() {
    static auto* const records = new OwnRecords;  // never destroyed, because exit() uses it
    return *records;
  }

  void add(Record& record) {
    const std::lock_guard lock(mutex_);
    records_.insert(&record);
  }

  void remove(Record& record) {
    const std::lock_guard lock(mutex_);
    records_.erase(&record);
  }

  void note_exit(int code) {
    const std::lock_guard lock(mutex_);
    for (Record* record : records_) {
      if (record->pid == getpid()) {  // otherwise it is a copy made by fork()
        record->exit_code.store(code);
        note_end(*record, RankState::kExited);
      }
    }
  }

 private:
  OwnRecords() {
    on_exit([](int code, void*) { instance().note_exit(code); }, nullptr);
  }

  std::mutex mutex_;
  std::set<Record*> records_;
};

/// The folder for a job's records on this host; the same for all ranks of the job, and different
/// for other jobs.
std::string temporary_folder(const std::vector<RecordPtr>& records) {
  for (const RecordPtr& memory : records) {
    if (memory != nullptr) {
      const Record& record = memory->record();
      return std::filesystem::temp_directory_path() /
             ("tessera-" + std::to_string(record.pid) + "-" + std::to_string(record.start_time));
    }
  }
  return "";
}

WatchedThread thread_of(const Record& record) {
  return {record.pid, record.start_time, record.thread.load()};
}

}  // namespace

std::string run_folder() {
  return environment_variable("TESSERA_RUN_DIR").value_or("");
}

std::string advice_behind(const std::string& what_they_do) {
  return what_they_do.ends_with("look for its error") ? "" : "; look at what they do instead";
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
  record.host = flight::padded<sizeof(Record::host)>(host_name());
  record.magic.store(flight::kMagic, std::memory_order_release);
  return memory;
}

WorldWatch::WorldWatch(const WatchSettings& settings, std::vector<RecordPtr> records,
                       std::unique_ptr<RemotePeers> remote)
    : settings_(settings),
      records_(std::move(records)),
      remote_(std::move(remote)),
      watchdog_(std::make_unique<Watchdog>(*this)) {
  if (settings_.folder.empty()) {
    settings_.folder = temporary_folder(records_);
  }
  OwnRecords::instance().add(own());
}

WorldWatch::~WorldWatch() {
  end();
  OwnRecords::instance().remove(own());
}

void WorldWatch::end() {
  watchdog_->stop();
  // If an exception destroys the world, the other ranks should look for its message.
  const bool fails = std::uncaught_exceptions() > 0;
  if (note_end(own(), fails ? RankState::kGaveUp : RankState::kEnded) && remote_ != nullptr) {
    remote_->tell_left(settings_.rank, exit_reason(settings_.rank));
  }
}

Record& WorldWatch::own() const {
  return records_[static_cast<std::size_t>(settings_.rank)]->record();
}

void WorldWatch::give_up() {
  if (note_end(own(), RankState::kGaveUp) && remote_ != nullptr) {
    remote_->tell_left(settings_.rank, exit_reason(settings_.rank));
  }
}

bool WorldWatch::may_come(int rank) const {
  const RecordPtr& memory = records_[static_cast<std::size_t>(rank)];
  if (memory == nullptr) {
    return remote_ == nullptr || remote_->left(rank).empty();
  }
  const Record& record = memory->record();
  return record.state.load() == RankState::kRunning && is_alive({record.pid, record.start_time});
}

std::optional<int> WorldWatch::first_to_end(const std::vector<int>& ranks) const {
  std::optional<int> first;
  std::int64_t earliest = std::numeric_limits<std::int64_t>::max();
  for (const int rank : ranks) {
    if (may_come(rank)) {
      continue;
    }
    // A killed process has recorded no time, and it did not end because of other ranks.
    const RecordPtr& memory = records_[static_cast<std::size_t>(rank)];
    const std::int64_t ended =
        memory == nullptr ? earliest : memory->record().ended.load(std::memory_order_relaxed);
    if (!first || ended < earliest) {
      first = rank;
      earliest = ended;
    }
  }
  return first;
}

bool WorldWatch::is_stopped(int rank) const {
  const RecordPtr& memory = records_[static_cast<std::size_t>(rank)];
  const std::int64_t pid = memory == nullptr ? 0 : memory->record().pid;
  const auto status = memory == nullptr ? std::nullopt : thread_status(pid, pid);
  return status && (status->state == 'T' || status->state == 't');
}

std::string WorldWatch::exit_reason(int rank) const {
  const RecordPtr& memory = records_[static_cast<std::size_t>(rank)];
  if (memory == nullptr) {
    return remote_ == nullptr ? "" : remote_->left(rank);
  }
  flight::RankReport report = flight::read(memory->record());
  if (!is_alive({memory->record().pid, memory->record().start_time})) {
    report.activity = flight::Activity::kGone;
  }
  return flight::exit_reason(report);
}

std::vector<flight::RankReport> WorldWatch::reports() const {
  std::vector<flight::RankReport> reports;
  for (const RecordPtr& memory : records_) {
    if (memory != nullptr) {
      reports.push_back(flight::read(memory->record()));
    }
  }
  return reports;
}

std::vector<flight::RankReport> WorldWatch::observe() const {
  std::vector<WatchedThread> threads;
  std::vector<std::uint64_t> begun;
  for (const RecordPtr& memory : records_) {
    if (memory != nullptr) {
      threads.push_back(thread_of(memory->record()));
      begun.push_back(memory->record().calls_begun.load());
    }
  }
  const std::vector<flight::Activity> activities = observe_threads(threads);
  auto activity = activities.begin();
  for (const RecordPtr& memory : records_) {
    if (memory != nullptr) {
      memory->record().activity.store(*activity++);
    }
  }
  auto before = begun.begin();
  std::vector<flight::RankReport> result = reports();
  for (flight::RankReport& report : result) {
    report.progress = report.calls_begun - *before++;
  }
  return result;
}

std::string WorldWatch::what_they_do(const std::vector<int>& ranks) const {
  constexpr std::size_t kMost = 4;
  const std::vector<flight::RankReport> seen = observe();
  std::string text;
  for (const int rank : std::span(ranks).first(std::min(kMost, ranks.size()))) {
    const auto found = std::ranges::find(seen, rank, &flight::RankReport::rank);
    if (found != seen.end()) {
      text += (text.empty() ? "" : "; ") + flight::what_it_does(*found, seen);
    }
  }
  return text;
}

void WorldWatch::write_records() const {
  if (!run_folder().empty()) {
    return;  // the records are already files there
  }
  try {
    std::filesystem::create_directories(settings_.folder);
    for (const RecordPtr& memory : records_) {
      if (memory != nullptr) {
        const Record& record = memory->record();
        files::write_file(
            settings_.folder + "/" + flight::record_name(settings_.world, record.rank),
            std::string(reinterpret_cast<const char*>(&record), sizeof record));
      }
    }
  } catch (const std::exception&) {
    // A failed report must not end the job.
  }
}

std::vector<std::string> WorldWatch::answers_of_other_hosts(std::int64_t question,
                                                            std::chrono::milliseconds most) const {
  if (remote_ == nullptr) {
    return {};
  }
  if (question == 0) {  // the store did not answer
    return {
        "rank 0 does not answer, nor does the store (rank 0's, or the launcher's): a process "
        "is stopped, or its host is out of reach"};
  }
  const auto deadline = std::chrono::steady_clock::now() + most;
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < records_.size(); ++i) {
    const auto rank = static_cast<int>(i);
    std::optional<std::string> answer;
    while (records_[i] == nullptr && !(answer = remote_->answer_of(question, rank)) &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(kPoll);
    }
    if (records_[i] == nullptr) {
      lines.push_back(answer.value_or("rank " + std::to_string(rank) +
                                      " does not answer: nothing of its job runs on its host, or "
                                      "the host is out of reach"));
    }
  }
  return lines;
}

std::optional<std::uint64_t> WorldWatch::calls_begun(int rank, std::uint64_t group) const {
  const RecordPtr& memory = records_[static_cast<std::size_t>(rank)];
  if (memory == nullptr) {
    return std::nullopt;
  }
  for (const flight::GroupSlot& slot : memory->record().groups) {
    const std::uint64_t id = slot.id.load(std::memory_order_acquire);
    if (id == group) {
      return slot.begun.load(std::memory_order_acquire);
    }
    if (id == 0) {
      break;
    }
  }
  return 0;
}

}  // namespace tessera::comm
