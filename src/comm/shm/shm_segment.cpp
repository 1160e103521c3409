// Shared memory, and waiting for other ranks. Layout: a header, a RankState for each rank, then two
// slots (buffers) for each rank.

#include "shm/shm_segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <new>
#include <thread>
#include <utility>

#include "tessera/core/detail/rounding.h"
#include "watch/watch.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using tessera::detail::round_up;

constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kPage = 4096;
/// The smallest size of a slot (a rank's buffer). Slots are larger while all slots together have at
/// most 128 MiB. Larger slots need fewer rounds, but more cache.
constexpr std::size_t kSmallestSlot = std::size_t{1} << 20;
constexpr std::size_t kLargestSlot = std::size_t{4} << 20;
constexpr std::size_t kSlotsTogether = std::size_t{128} << 20;
/// The interval at which a sleeping rank checks whether the other ranks are still alive.
constexpr milliseconds kPeerCheck{100};
/// How many times a waiting rank checks for other ranks before it sleeps: for about 20 us.
constexpr int kSpins = 500;

using Counter = std::atomic<std::uint32_t>;
static_assert(Counter::is_always_lock_free && sizeof(Counter) == sizeof(std::uint32_t));

/// Whether `counter` has reached `round` (counter >= round). Both numbers wrap around.
bool reached(std::uint32_t counter, std::uint32_t round) {
  return static_cast<std::int32_t>(counter - round) >= 0;
}

void futex_wait(const Counter& word, std::uint32_t seen, milliseconds most) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(most);
  const timespec duration{seconds.count(), std::chrono::nanoseconds(most - seconds).count()};
  // FUTEX_PRIVATE_FLAG is not set, because several processes share the futex. A spurious wake-up is
  // harmless, because every caller checks the counter again.
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &duration, nullptr, 0);
}

void futex_wake_all(const Counter& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// Returns how many times a waiting rank checks for other ranks before sleeping. With more ranks
/// than cores, a rank sleeps after the first check.
int spins_before_sleep(const GroupInfo& group) {
  static const unsigned cores = std::thread::hardware_concurrency();
  return cores >= static_cast<unsigned>(group.ranks_here) ? kSpins : 1;
}

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

struct ShmSegment::Header {
  std::int32_t ranks = 0;
  std::uint64_t slot_bytes = 0;
  alignas(kCacheLine) Counter arrivals{0};   ///< number of arrive() calls of all ranks together
  alignas(kCacheLine) Counter completed{0};  ///< last round that all ranks have reached; a futex
  Counter sleepers{0};
};

/// The state of one rank, which only that rank writes and all ranks read. `calls` has one element
/// for even rounds and one for odd rounds.
struct alignas(kCacheLine) ShmSegment::RankState {
  Counter round{0};
  std::array<ShmCall, 2> calls;
};

ShmSegment::ShmSegment(SharedFile file, std::string handle)
    : file_(std::move(file)),
      base_(static_cast<std::byte*>(file_.base.get())),
      ranks_(header().ranks),
      slot_bytes_(header().slot_bytes),
      handle_(std::move(handle)) {}

std::unique_ptr<ShmSegment> ShmSegment::create(int ranks) {
  const auto count = static_cast<std::size_t>(ranks);
  const std::size_t slot =
      std::clamp(round_up(kSlotsTogether / (2 * count), kPage), kSmallestSlot, kLargestSlot);
  const std::size_t control = round_up(sizeof(Header) + count * sizeof(RankState), kPage);
  const std::size_t bytes = control + 2 * count * slot;
  // The shared memory has no name in /dev/shm, so a killed job leaves no file behind.
  const int fd = memfd_create("tessera-group", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    close(fd);
    return nullptr;
  }
  const std::string handle = handle_of_file(fd);
  SharedFile file = map_file(fd);
  if (file.base == nullptr) {
    return nullptr;
  }
  // Placement new begins the lifetime of the atomics. New pages are zero and are allocated at the
  // first access.
  auto* header = new (file.base.get()) Header;
  header->ranks = ranks;
  header->slot_bytes = slot;
  std::unique_ptr<ShmSegment> segment(new ShmSegment(std::move(file), handle));
  for (int rank = 0; rank < ranks; ++rank) {
    new (&segment->state(rank)) RankState;
  }
  return segment;
}

std::unique_ptr<ShmSegment> ShmSegment::open(const std::string& handle) {
  SharedFile file = open_file(handle);
  return std::unique_ptr<ShmSegment>(
      file.base == nullptr ? nullptr : new ShmSegment(std::move(file), handle));
}

ShmSegment::Header& ShmSegment::header() const {
  return *reinterpret_cast<Header*>(base_);
}

ShmSegment::RankState& ShmSegment::state(int rank) const {
  return reinterpret_cast<RankState*>(base_ + sizeof(Header))[rank];
}

// The slots (buffers) are at the end of the memory, so offsets are computed from the end.
std::byte* ShmSegment::slot(int rank, std::uint32_t round) const {
  const auto index = 2 * static_cast<std::size_t>(rank) + round % 2;
  return base_ + file_.bytes - (2 * static_cast<std::size_t>(ranks_) - index) * slot_bytes_;
}

ShmCall& ShmSegment::call(int rank, std::uint32_t round) const {
  return state(rank).calls[round % 2];
}

void ShmSegment::arrive(int rank, std::uint32_t round) const {
  // The rank's `round` is written last: if this rank is killed before that, other ranks report this
  // rank as missing.
  Header& shared = header();
  // `arrivals` is never reset to 0: a reset could lose an arrive() of another rank.
  const std::uint32_t arrivals = shared.arrivals.fetch_add(1, std::memory_order_acq_rel) + 1;
  if (arrivals == round * static_cast<std::uint32_t>(ranks_)) {
    // Because of sequential consistency, either a rank that is about to sleep sees the new
    // `completed`, or this rank sees a nonzero `sleepers` and wakes the sleeping rank.
    shared.completed.store(round, std::memory_order_seq_cst);
    if (shared.sleepers.load(std::memory_order_seq_cst) != 0) {
      futex_wake_all(shared.completed);
    }
  }
  state(rank).round.store(round, std::memory_order_release);
}

bool ShmSegment::arrived(std::uint32_t round) const {
  return reached(header().completed.load(std::memory_order_acquire), round);
}

void ShmSegment::sleep_until_arrived(std::uint32_t round, milliseconds most) const {
  Header& shared = header();
  shared.sleepers.fetch_add(1, std::memory_order_seq_cst);
  // The kernel compares `completed` with `seen`, which is read after the increment of `sleepers`.
  // If `completed` has changed since, the kernel returns at once and does not sleep.
  const std::uint32_t seen = shared.completed.load(std::memory_order_seq_cst);
  if (!reached(seen, round)) {
    futex_wait(shared.completed, seen, most);
  }
  shared.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void ShmSegment::wait(const GroupInfo& group, std::uint32_t round, const char* collective) const {
  // Spins before sleeping in the kernel, because the other ranks often arrive within microseconds.
  const int spins = spins_before_sleep(group);
  for (int i = 0; i < spins; ++i) {
    if (arrived(round)) {
      return;
    }
    pause_briefly();
  }
  PeerWait peers(group, collective);
  while (!arrived(round)) {
    sleep_until_arrived(round, std::min(kPeerCheck, group.timeout));
    if (!arrived(round)) {
      // The other ranks are checked after each sleep, because a dead rank does not wake this rank.
      peers.check(missing(group, round));
    }
  }
}

/// Returns the world ranks that have not called arrive() for `round`.
std::vector<int> ShmSegment::missing(const GroupInfo& group, std::uint32_t round) const {
  std::vector<int> result;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (!reached(state(rank).round.load(std::memory_order_acquire), round)) {
      result.push_back(group.ranks[static_cast<std::size_t>(rank)]);
    }
  }
  return result;
}

void ShmSegment::wake_peers() const {
  futex_wake_all(header().completed);
}

}  // namespace tessera::comm
