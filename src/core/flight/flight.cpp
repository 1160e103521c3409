// Reads the flight records of a job's ranks (their last collectives) and explains a hang in words.

#include "tessera/core/detail/flight_record.h"

#include <array>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::flight {
using detail::concat;

std::vector<int> ranks_of(const Record& record, std::uint64_t id) {
  std::vector<int> ranks;
  const GroupSlot* const group = find_group(record, id);
  for (std::size_t bit = 0; group != nullptr && bit < kMostRanks; ++bit) {
    if ((group->ranks[bit / 64] >> (bit % 64) & 1) != 0) {
      ranks.push_back(static_cast<int>(bit));
    }
  }
  return ranks;
}

bool has_begun(const Record& record, std::uint64_t id, std::uint64_t number) {
  const GroupSlot* const group = find_group(record, id);
  return group != nullptr && group->begun.load(std::memory_order_acquire) > number;
}

namespace {

/// Returns the process group of the longest wait. If the rank does not wait, returns the group of
/// the last collective; nullptr if the rank has begun no collective.
const GroupSlot* current_group(const Record& record) {
  const GroupSlot* current = nullptr;
  for (const GroupSlot& slot : record.groups) {
    const auto is_better = [&] {
      return slot.waits != current->waits ? slot.waits.load()
             : slot.waits                 ? slot.since < current->since
                                          : slot.since > current->since;
    };
    if (slot.begun != 0 && (current == nullptr || is_better())) {
      current = &slot;
    }
  }
  return current;
}

}  // namespace

std::string what_it_does(const Record& record, bool alive) {
  const GroupSlot* const group = current_group(record);
  const bool waits = group != nullptr && group->waits;
  const RankState state = record.state;
  const char* const does = state == RankState::kEnded    ? "ended"
                           : state == RankState::kGaveUp ? "gave up"
                           : !alive                      ? "died"
                           : waits                       ? "waits"
                                                         : "is outside of collectives,";
  return concat(does,
                group == nullptr ? " before its first collective"
                : waits          ? " in "
                                 : " after ",
                group == nullptr ? "" : group->call.load(),
                record.step < 0 ? "" : concat(", after step ", record.step.load()));
}

std::string record_name(int world, int rank) {
  return concat("world-", world, ".rank-", rank, ".flight");
}

std::string name_ranks(const std::vector<int>& ranks) {
  constexpr std::size_t kShortestRun = 3;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t first = 0, end = 0; first < ranks.size(); first = end) {
    for (end = first + 1; end < ranks.size() && ranks[end] == ranks[end - 1] + 1;) {
      ++end;
    }
    end = end - first < kShortestRun ? first + 1 : end;
    text += concat(first == 0 ? "" : ", ", ranks[first]);
    text += end == first + 1 ? "" : concat("-", ranks[end - 1]);
  }
  return text;
}

namespace {

std::string since_text(std::int64_t since) {
  constexpr std::int64_t kNanosecondsPerSecond = 1'000'000'000;
  std::array<char, 32> text{};
  const std::time_t seconds = since / kNanosecondsPerSecond;
  std::tm local{};
  std::strftime(text.data(), text.size(), ", since %H:%M:%S", localtime_r(&seconds, &local));
  return text.data();
}

}  // namespace

std::vector<std::string> explain_records(const std::string& folder) {
  std::map<std::pair<int, int>, std::unique_ptr<const Record>> records;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    int world = 0;
    int rank = 0;
    if (std::sscanf(name.c_str(), "world-%d.rank-%d.flight", &world, &rank) == 2 &&
        name == record_name(world, rank)) {
      auto record = std::make_unique<Record>();
      std::ifstream file(entry.path(), std::ios::binary);
      file.read(reinterpret_cast<char*>(record.get()), sizeof(Record));
      TESSERA_CHECK(record->magic == kMagic, entry.path().string(),
                    " is not a flight record of this version of Tessera; read the record with the "
                    "tessera-run of the version that wrote the record");
      records[{world, rank}] = std::move(record);
    }
  }
  TESSERA_CHECK(!error, "the folder ", folder, " cannot be read: ", error.message());
  TESSERA_CHECK(!records.empty(), "the folder ", folder,
                " holds no flight records (world-0.rank-0.flight, ...); pass the folder that "
                "tessera-run printed");
  std::vector<std::string> lines;
  for (const auto& [key, record] : records) {
    const auto [world, rank] = key;
    std::string line =
        concat("world ", world, ", rank ", rank, " of ", record->size, " ", what_it_does(*record));
    if (const GroupSlot* const group = current_group(*record)) {
      line += since_text(group->since);
      std::vector<int> missing = ranks_of(*record, group->id);
      std::erase_if(missing, [&, world = world](int peer) {
        const auto found = records.find({world, peer});
        return found != records.end() && has_begun(*found->second, group->id, group->number);
      });
      line += missing.empty() ? "" : "; not begun, or no record here: " + name_ranks(missing);
    }
    lines.push_back(line);
  }
  return lines;
}

}  // namespace tessera::flight
