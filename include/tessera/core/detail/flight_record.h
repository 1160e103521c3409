#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::flight {

// The flight record of a rank: its last collectives, in memory that other ranks on the same host
// read while it runs, and that `tessera-run --explain` reads afterwards. One rank writes; any
// process may read at any time. Times are nanoseconds since 1970.

constexpr std::uint64_t kMagic = 0x3164726365725354;  // "TSrecrd1"
constexpr std::size_t kGroups = 128;
constexpr std::size_t kCalls = 1024;
constexpr std::size_t kThreads = 16;
/// Stands for more than one thread, and for threads that found no free slot.
constexpr std::int64_t kSeveralThreads = -1;

enum class CallState : std::uint32_t { kBegun, kWaiting, kDone, kFailed };
enum class RankState : std::uint32_t {
  kRunning,
  kEnded,   ///< its world has ended; the process may continue
  kExited,  ///< the process has ended by exit()
  kGaveUp   ///< World::abort()
};
/// The work that keeps a thread from its next collective, as reported by the thread.
enum class Work : std::uint32_t { kNone, kReading, kWriting };
/// The state of a rank's thread, as the operating system reports it.
enum class Activity : std::uint32_t { kUnknown, kRuns, kSleeps, kStopped, kGone };

/// A text padded with zeros. A long text is cut at the front, because its end is more specific.
template <std::size_t Size>
std::array<char, Size> padded(std::string_view text) {
  std::array<char, Size> result{};
  const std::size_t length = std::min(text.size(), Size);
  std::copy_n(text.end() - static_cast<std::ptrdiff_t>(length), length, result.begin());
  return result;
}

/// The text of an array made by padded().
template <std::size_t Size>
std::string_view unpadded(const std::array<char, Size>& text) {
  return {text.data(), static_cast<std::size_t>(std::ranges::find(text, '\0') - text.begin())};
}

/// A value stored in atomic words, so that it may be read while it is written. CallSlot explains
/// how a reader detects a mixture of two values.
template <class T>
class SharedWords {
 public:
  void store(const T& value) {
    const auto words = std::bit_cast<Words>(value);
    for (std::size_t i = 0; i < words.size(); ++i) {
      words_[i].store(words[i], std::memory_order_relaxed);
    }
  }
  T load() const {
    Words words;
    for (std::size_t i = 0; i < words.size(); ++i) {
      words[i] = words_[i].load(std::memory_order_acquire);
    }
    return std::bit_cast<T>(words);
  }

 private:
  using Words = std::array<std::uint64_t, sizeof(T) / sizeof(std::uint64_t)>;
  std::array<std::atomic<std::uint64_t>, std::tuple_size_v<Words>> words_{};
};

/// The properties of a collective that do not change.
struct CallLabel {
  std::uint64_t group = 0;   ///< GroupSlot::id
  std::uint64_t number = 0;  ///< in its group; 0 is the group's set-up
  std::int64_t thread = 0;   ///< the thread that began the call
  std::int64_t bytes = 0;
  std::int64_t step = -1;
  std::int64_t begun = 0;
  std::array<char, 24> collective{};
  std::array<char, 72> purpose{};
  std::array<char, 56> caller{};
};

struct CallSlot {
  /// The call's number over all groups of the rank, from 1; 0 while the slot is being written. A
  /// reader that sees the same number before and after has read one call.
  std::atomic<std::uint64_t> order{0};
  SharedWords<CallLabel> label;
  std::atomic<CallState> state{CallState::kBegun};
  std::atomic<std::int64_t> waits_since{0};
  std::atomic<std::int64_t> ended{0};
};

struct GroupLabel {
  std::array<char, 64> name{};
  std::array<char, 128> ranks{};  ///< see ranks_text()
};

struct GroupSlot {
  std::atomic<std::uint64_t> id{0};  ///< equal on all ranks; 0: a free slot
  SharedWords<GroupLabel> label;
  std::atomic<std::uint64_t> begun{0};  ///< number of calls begun, including the set-up
  std::atomic<std::int64_t> thread{0};  ///< the thread that makes the calls, or kSeveralThreads
};

/// A thread that has begun or waited for a collective; listed until the thread ends.
struct ThreadSlot {
  std::atomic<std::int64_t> id{0};  ///< the system's number; 0: a free slot
  /// when the thread last made progress with files; 0: not since its last call
  std::atomic<std::int64_t> worked{0};
  std::atomic<Work> work{Work::kNone};
};

struct Record {
  std::atomic<std::uint64_t> magic{0};  ///< kMagic, written last
  std::uint64_t bytes = 0;              ///< sizeof(Record) of the writer
  std::uint64_t token = 0;              ///< identifies the record to other ranks
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::int64_t pid = 0;
  std::uint64_t start_time = 0;  ///< of the process, in clock ticks since boot
  std::array<char, 64> host{};
  std::atomic<RankState> state{RankState::kRunning};
  std::atomic<std::int64_t> ended{0};  ///< when the state changed from kRunning
  std::atomic<std::int32_t> exit_code{0};
  std::atomic<std::int64_t> step{-1};
  /// the thread that last began or waited for a collective
  std::atomic<std::int64_t> thread{0};
  std::array<ThreadSlot, kThreads> threads;
  /// as last observed by a watchdog on the host
  std::atomic<Activity> activity{Activity::kUnknown};
  std::atomic<std::uint64_t> calls_begun{0};
  std::array<GroupSlot, kGroups> groups;
  std::array<CallSlot, kCalls> calls;
};

}  // namespace tessera::flight
TESSERA_API_END
