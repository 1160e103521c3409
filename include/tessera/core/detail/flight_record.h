#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::flight {

// The flight record of a rank stores the rank's last collectives in shared memory. Other ranks on
// the machine read the record while the rank runs. If TESSERA_RUN_DIR is set, the record is a file
// that `tessera-run --explain` reads afterwards, complete even if the rank was killed. Only the
// rank itself writes its record. Times are nanoseconds since 1970.

constexpr std::uint64_t kMagic = 0x3264726365725354;  // first bytes of a record file: "TSrecrd2"
constexpr std::size_t kGroups = 128;
constexpr std::size_t kCalls = 1024;
constexpr std::size_t kMostRanks = 4096;

enum class RankState : std::uint32_t {
  kRunning,
  kEnded,  ///< the rank has destroyed its World; the process may continue
  kGaveUp  ///< the rank has called World::abort()
};

/// Returns `text` as an array that is padded with zeros. Of a text longer than the array only the
/// end is kept, because the end is more specific.
template <std::size_t Size>
std::array<char, Size> padded(std::string_view text) {
  std::array<char, Size> result{};
  const std::size_t length = std::min(text.size(), Size);
  std::copy_n(text.end() - static_cast<std::ptrdiff_t>(length), length, result.begin());
  return result;
}

/// Returns the text in an array that was made by padded().
template <std::size_t Size>
std::string unpadded(const std::array<char, Size>& text) {
  return {text.begin(), std::ranges::find(text, '\0')};
}

/// A value of type T stored in atomic words, so that one process may read the value while another
/// process writes it. A reader may get a mixture of two values; CallSlot::order detects this.
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

/// The properties of a collective that do not change once the collective has begun.
struct CallLabel {
  std::uint64_t group = 0;  ///< GroupSlot::id of the collective's group
  /// Number of the collective within its process group; 0 is the initialisation of the group.
  std::uint64_t number = 0;
  std::array<char, 24> collective{};
  std::array<char, 72> purpose{};  ///< purpose of the collective, for example "unit 'layers.3'"
  std::array<char, 56> caller{};   ///< the library function that the program called
};

struct CallSlot {
  /// The call's number over all groups of the rank, from 1; 0 while the slot is being written. If
  /// `order` is equal before and after reading the label, the label is not a mixture of two calls.
  std::atomic<std::uint64_t> order{0};
  SharedWords<CallLabel> label;
  /// Whether a CPU thread or the GPU is waiting for the end of the call.
  std::atomic<bool> waits{false};
  std::atomic<std::int64_t> since{0};  ///< time at which the member `waits` last changed
};

struct GroupSlot {
  /// Id of the process group, equal on all ranks, written last; 0 means that the slot is unused.
  std::atomic<std::uint64_t> id{0};
  std::atomic<std::uint64_t> begun{0};  ///< number of collectives that the rank has begun here,
  ///< including the initialisation of the group
  std::array<char, 64> name{};
  /// World ranks of the process group, as bits: rank r is bit r % 64 of word r / 64.
  std::array<std::uint64_t, kMostRanks / 64> ranks{};
};

struct Record {
  std::atomic<std::uint64_t> magic{0};  ///< the constant kMagic, written last
  std::uint64_t bytes = 0;              ///< sizeof(Record) in the process that wrote the record
  std::uint64_t token = 0;              ///< random number by which other ranks recognise the record
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::int64_t pid = 0;
  std::uint64_t start_time = 0;  ///< start time of the process, in clock ticks since boot
  std::atomic<RankState> state{RankState::kRunning};
  /// Time at which the state changed from kRunning to another state.
  std::atomic<std::int64_t> ended{0};
  std::atomic<std::int64_t> step{-1};
  std::atomic<std::uint64_t> calls_begun{0};
  std::array<GroupSlot, kGroups> groups;
  std::array<CallSlot, kCalls> calls;
};

/// A collective that was read from a flight record.
struct Call {
  CallLabel label;
  bool waits = false;
  std::int64_t since = 0;
};

/// Reads the call whose CallSlot::order is `order`; nullopt if `record` no longer contains it.
std::optional<Call> read_call(const Record& record, std::uint64_t order);
/// Returns the collective in which the rank has waited longest, or the rank's last collective if
/// the rank does not wait; nullopt if the rank has begun no collective.
std::optional<Call> current_call(const Record& record);
/// Reads call number `number` of group `group`; nullopt if the record does not contain it.
std::optional<Call> find_call(const Record& record, std::uint64_t group, std::uint64_t number);
/// Whether the rank has begun the collective `call`, and not another collective with the same
/// number. If `call.collective` is empty, only group and number are compared.
bool has_begun(const Record& record, const CallLabel& call);

/// Text for a call: "all_reduce for unit 'a' (call 7 of group 'dp'), called by clip_grad_norm_".
std::string to_text(const Record& record, const CallLabel& call);
/// Describes a rank's progress: "after step 20" or, if no training step is known, "after all_reduce
/// (call 7 of group 'dp')".
std::string progress_text(const Record& record);
/// Describes what a rank does: "waits in ...", "is outside of collectives, after ...".
std::string what_it_does(const Record& record);

/// Returns the file name of a rank's flight record, `world-W.rank-R.flight`.
std::string record_name(int world, int rank);

/// Returns a list of ranks as text: "rank 1" or "ranks 0, 2-7".
std::string name_ranks(const std::vector<int>& ranks);

/// Explains a hang from the flight records in `folder`. Returns lines of text: which rank did not
/// call the same collectives as the other ranks, and what each rank did last. Throws Error if the
/// folder contains no records.
std::vector<std::string> explain_records(const std::string& folder);

}  // namespace tessera::flight
TESSERA_API_END
