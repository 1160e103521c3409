#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::flight {

// The flight record of a rank: the last collective in each process group. The record is in shared
// memory that other ranks on the machine can read. With TESSERA_RUN_DIR, the record is a file for
// `tessera-run --explain`, complete even if the rank is killed. Times are nanoseconds since 1970.

constexpr std::uint64_t kMagic = 0x3364726365725354;  // first bytes of a record file: "TSrecrd3"
constexpr std::size_t kGroups = 256;
constexpr std::size_t kMostRanks = 4096;

enum class RankState : std::uint32_t {
  kRunning,
  kEnded,  ///< the rank has destroyed its World; the process can continue
  kGaveUp  ///< the rank has called World::abort()
};

/// A string in an array of atomic 64-bit words. A concurrent reader can get a mixture of the old
/// and the new string. Long strings are cut off.
class SharedText {
 public:
  void store(std::string text) {
    text.resize(sizeof words_);
    for (std::size_t i = 0; i < words_.size(); ++i) {
      std::uint64_t word = 0;
      std::memcpy(&word, &text[i * sizeof word], sizeof word);
      words_[i].store(word, std::memory_order_relaxed);
    }
  }
  std::string load() const {
    std::array<std::uint64_t, kWords + 1> words{};
    std::ranges::copy(words_, words.begin());
    return reinterpret_cast<const char*>(words.data());
  }

 private:
  static constexpr std::size_t kWords = 24;
  std::array<std::atomic<std::uint64_t>, kWords> words_{};
};

/// A rank's entry for one process group in the rank's flight record.
struct GroupSlot {
  /// Id of the process group, equal on all ranks. 0: unused; not 0: `ranks` is valid.
  std::atomic<std::uint64_t> id{0};
  /// World ranks of the process group, as bits: rank r is bit r % 64 of word r / 64.
  std::array<std::uint64_t, kMostRanks / 64> ranks{};
  /// Number of the group's collectives that the rank has begun, including the group's set-up.
  std::atomic<std::uint64_t> begun{0};
  /// Describes the rank's last collective in the group, or the collective for which the rank waits.
  SharedText call;
  std::atomic<std::uint64_t> number{0};  ///< index in the group of the collective in `call`
  std::atomic<bool> waits{false};        ///< whether the rank waits for this collective
  std::atomic<std::int64_t> since{0};    ///< time at which `number` or `waits` last changed
};

struct Record {
  std::atomic<std::uint64_t> magic{0};  ///< the constant `kMagic`, written after all other fields
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::int64_t pid = 0;
  std::uint64_t start_time = 0;  ///< start time of the process, in clock ticks since boot
  int fd = -1;                   ///< file descriptor of the flight record in the rank's process
  std::atomic<RankState> state{RankState::kRunning};
  /// Time at which `state` changed from kRunning to another value.
  std::atomic<std::int64_t> ended{0};
  std::atomic<std::int64_t> step{-1};
  std::array<GroupSlot, kGroups> groups;
};

/// Returns the entry of the process group `id`; nullptr if the record has no such entry.
auto* find_group(auto& record, std::uint64_t id) {
  auto* const slot = std::ranges::find(record.groups, id, [](const GroupSlot& each) {
    return each.id.load(std::memory_order_acquire);
  });
  return id == 0 || slot == record.groups.end() ? nullptr : slot;
}
/// The world ranks of the process group `id`; empty if the record has no entry of the group.
std::vector<int> ranks_of(const Record& record, std::uint64_t id);
/// Whether the rank has begun the collective of index `number` in the process group `id`.
bool has_begun(const Record& record, std::uint64_t id, std::uint64_t number);

/// Describes what a rank does: "waits in ...". `alive`: whether the rank's process runs.
std::string what_it_does(const Record& record, bool alive = true);

/// Returns the file name of a rank's flight record, `world-W.rank-R.flight`.
std::string record_name(int world, int rank);

/// Returns a list of ranks as text: "rank 1" or "ranks 0, 2-7".
std::string name_ranks(const std::vector<int>& ranks);

/// Explains a hang by the flight records in `folder`. Returns one line per rank: the rank's last
/// collective, and the ranks that have not begun this collective. Throws Error without a record.
std::vector<std::string> explain_records(const std::string& folder);

}  // namespace tessera::flight
TESSERA_API_END
