// Reads the flight records of a job's ranks (their last collectives) and explains a hang in words.

#include "tessera/core/detail/flight_record.h"

#include <array>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::flight {
namespace {

using detail::concat;

const GroupSlot* find_group(const Record& record, std::uint64_t id) {
  for (const GroupSlot& slot : record.groups) {
    const std::uint64_t found = slot.id.load(std::memory_order_acquire);
    if (found == id || found == 0) {
      return found == id ? &slot : nullptr;
    }
  }
  return nullptr;
}

}  // namespace

std::optional<Call> read_call(const Record& record, std::uint64_t order) {
  const CallSlot& slot = record.calls[order % kCalls];
  const bool same = slot.order.load(std::memory_order_acquire) == order;
  const Call call{slot.label.load(), slot.waits.load(std::memory_order_acquire),
                  slot.since.load(std::memory_order_acquire)};
  return order != 0 && same && slot.order.load(std::memory_order_relaxed) == order
             ? std::optional(call)
             : std::nullopt;
}

std::optional<Call> current_call(const Record& record) {
  std::optional<Call> longest;
  for (const CallSlot& slot : record.calls) {
    if (slot.waits.load(std::memory_order_acquire)) {
      const auto call = read_call(record, slot.order.load(std::memory_order_acquire));
      if (call && call->waits && (!longest || call->since < longest->since)) {
        longest = call;
      }
    }
  }
  return longest ? longest : read_call(record, record.calls_begun.load(std::memory_order_acquire));
}

std::optional<Call> find_call(const Record& record, std::uint64_t group, std::uint64_t number) {
  const std::uint64_t last = record.calls_begun.load(std::memory_order_acquire);
  for (std::uint64_t order = last; order > 0 && order + kCalls > last; --order) {
    const auto call = read_call(record, order);
    if (call && call->label.group == group && call->label.number <= number) {
      return call->label.number == number ? call : std::nullopt;
    }
  }
  return std::nullopt;
}

bool has_begun(const Record& record, const CallLabel& call) {
  const GroupSlot* group = find_group(record, call.group);
  if (group == nullptr || group->begun.load(std::memory_order_acquire) <= call.number) {
    return false;
  }
  const auto begun = find_call(record, call.group, call.number);
  return !begun || call.collective.front() == '\0' || begun->label.collective == call.collective;
}

std::string to_text(const Record& record, const CallLabel& call) {
  const GroupSlot* slot = find_group(record, call.group);
  const std::string group = slot == nullptr ? "?" : unpadded(slot->name);
  const std::string purpose = unpadded(call.purpose);
  const std::string caller = unpadded(call.caller);
  const std::string text =
      call.number == 0 ? concat("the set-up of group '", group, "'")
                       : concat(unpadded(call.collective), purpose.empty() ? "" : " for ", purpose,
                                " (call ", call.number, " of group '", group, "')");
  return caller.empty() ? text : text + ", called by " + caller;
}

std::string progress_text(const Record& record) {
  if (record.step >= 0) {
    return concat("after step ", record.step.load());
  }
  const auto call = current_call(record);
  return call ? "after " + to_text(record, call->label) : "before its first collective";
}

std::string what_it_does(const Record& record) {
  const auto call = current_call(record);
  const std::string text = call ? to_text(record, call->label) : "";
  switch (record.state.load()) {
    case RankState::kEnded:
      return "ended " + progress_text(record);
    case RankState::kGaveUp:
      return "gave up " + progress_text(record) +
             (call && record.step >= 0 ? ", in or after " + text : "") + "; look for its error";
    case RankState::kRunning:
      break;
  }
  return call && call->waits
             ? "waits in " + text
             : "is outside of collectives, " + (call ? "after " + text : progress_text(record));
}

std::string record_name(int world, int rank) {
  return concat("world-", world, ".rank-", rank, ".flight");
}

std::string name_ranks(const std::vector<int>& ranks) {
  constexpr std::size_t kShortestRun = 3;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t first = 0, end = 0; first < ranks.size(); first = end) {
    end = first + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) {
      ++end;
    }
    const bool is_run = end - first >= kShortestRun;
    end = is_run ? end : first + 1;
    text += concat(first == 0 ? "" : ", ", ranks[first]);
    text += is_run ? concat("-", ranks[end - 1]) : "";
  }
  return text;
}

namespace {

using RecordPtr = std::unique_ptr<const Record>;
using World = std::map<int, RecordPtr>;  // flight records of all ranks, by rank

/// Reads a flight record. Throws Error if the file contains no record of this format version.
RecordPtr load_record(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  auto record = std::make_unique<Record>();
  file.read(reinterpret_cast<char*>(record.get()), sizeof(Record));
  const bool whole = file.gcount() == static_cast<std::streamsize>(sizeof(Record));
  TESSERA_CHECK(whole && record->magic == kMagic && record->bytes == sizeof(Record), path.string(),
                " is no flight record of this version of Tessera; read it with the tessera-run of "
                "the version that wrote it");
  return record;
}

/// Reads the flight records in a folder, by number of the World: a job may have several.
std::map<int, World> read_records(const std::string& folder) {
  std::map<int, World> worlds;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    int world = 0;
    int rank = 0;
    if (std::sscanf(name.c_str(), "world-%d.rank-%d.flight", &world, &rank) == 2 &&
        name == record_name(world, rank)) {
      worlds[world][rank] = load_record(entry.path());
    }
  }
  TESSERA_CHECK(!error, "the folder ", folder, " cannot be read: ", error.message());
  TESSERA_CHECK(!worlds.empty(), "the folder ", folder,
                " holds no flight records (world-0.rank-0.flight, ...); give the folder that "
                "tessera-run named");
  return worlds;
}

/// Returns the ranks that belong to the process group of collective `call` and have not begun it.
std::vector<int> missing_ranks(const World& world, const Record& record, const CallLabel& call) {
  std::vector<int> missing;
  const GroupSlot* group = find_group(record, call.group);
  for (const auto& [rank, peer] : world) {
    const auto bit = static_cast<std::size_t>(rank);
    if (group != nullptr && bit < kMostRanks && (group->ranks[bit / 64] >> (bit % 64) & 1) != 0 &&
        !has_begun(*peer, call)) {
      missing.push_back(rank);
    }
  }
  return missing;
}

std::string since_text(std::int64_t since) {
  constexpr std::int64_t kNanosecondsPerSecond = 1'000'000'000;
  std::array<char, 32> text{};
  const std::time_t seconds = since / kNanosecondsPerSecond;
  std::tm local{};
  std::strftime(text.data(), text.size(), ", since %H:%M:%S", localtime_r(&seconds, &local));
  return since == 0 ? "" : text.data();
}

/// Adds lines that say what each rank did last; ranks with equal texts share a line.
void explain(const World& world, std::vector<std::string>& lines) {
  std::vector<std::tuple<std::string, std::int64_t, std::vector<int>>> groups;
  for (const auto& [rank, record] : world) {
    const auto call = current_call(*record);
    const bool lacks = call && (call->waits || record->state == RankState::kGaveUp);
    const auto missing = lacks ? missing_ranks(world, *record, call->label) : std::vector<int>();
    const std::string text =
        what_it_does(*record) +
        (missing.empty() ? "" : "; that call was not begun by " + name_ranks(missing));
    const std::int64_t ended = record->ended.load();
    const std::int64_t since = ended != 0 ? ended : call ? call->since : 0;
    auto same =
        std::ranges::find_if(groups, [&](const auto& group) { return get<0>(group) == text; });
    same = same == groups.end() ? groups.insert(same, {text, since, {}}) : same;
    get<1>(*same) = std::min(get<1>(*same), since);
    get<2>(*same).push_back(rank);
  }
  for (const auto& [text, since, ranks] : groups) {
    lines.push_back(concat("  ", ranks.size() == 1 ? "" : "each of ", name_ranks(ranks), " ", text,
                           since_text(since)));
  }
}

}  // namespace

std::vector<std::string> explain_records(const std::string& folder) {
  std::vector<std::string> lines;
  const auto worlds = read_records(folder);
  for (const auto& [number, world] : worlds) {
    const int size = world.begin()->second->size;
    lines.push_back(concat(worlds.size() == 1 ? "" : concat("world ", number, ", "), "records of ",
                           world.size(), " of ", size, " ranks"));
    explain(world, lines);
    std::vector<int> absent;
    for (int rank = 0; rank < size; ++rank) {
      if (!world.contains(rank)) {
        absent.push_back(rank);
      }
    }
    if (!absent.empty()) {
      lines.push_back("  no record here of " + name_ranks(absent) +
                      ": copy those of all nodes into one folder");
    }
  }
  return lines;
}

}  // namespace tessera::flight
