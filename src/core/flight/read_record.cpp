// Reads the flight records of a job's ranks.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>

#include "tessera/core/detail/flight_report.h"
#include "tessera/core/error.h"

namespace tessera::flight {
namespace {

/// The number of evenly spaced ranks from index `first` on.
std::size_t run_length(const std::vector<int>& ranks, std::size_t first) {
  std::size_t end = first + 1;
  if (end < ranks.size()) {
    const int stride = ranks[end] - ranks[first];
    while (stride > 0 && end < ranks.size() && ranks[end] - ranks[end - 1] == stride) {
      ++end;
    }
  }
  return end - first;
}

std::string run_text(int first, int last, int stride) {
  std::string text = std::to_string(first) + "-" + std::to_string(last);
  return stride == 1 ? text : text + "/" + std::to_string(stride);
}

/// Removes the number at the beginning of `text` and returns it; -1 if there is none.
int take_number(std::string_view& text) {
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return error == std::errc() ? value : -1;
}

bool take(std::string_view& text, char c) {
  const bool there = text.starts_with(c);
  text.remove_prefix(there ? 1 : 0);
  return there;
}

}  // namespace

std::string ranks_text(const std::vector<int>& ranks) {
  constexpr std::size_t kShortestRun = 3;
  std::string text;
  for (std::size_t i = 0; i < ranks.size();) {
    const std::size_t length = run_length(ranks, i);
    text += text.empty() ? "" : ", ";
    if (length < kShortestRun) {
      text += std::to_string(ranks[i]);
      ++i;
    } else {
      text += run_text(ranks[i], ranks[i + length - 1], ranks[i + 1] - ranks[i]);
      i += length;
    }
  }
  return text;
}

std::vector<int> parse_ranks(std::string_view text) {
  std::vector<int> ranks;
  while (!text.empty()) {
    const int first = take_number(text);
    const int last = take(text, '-') ? take_number(text) : first;
    const int stride = take(text, '/') ? take_number(text) : 1;
    if (first < 0 || last < first || stride < 1) {
      break;
    }
    for (int rank = first; rank <= last; rank += stride) {
      ranks.push_back(rank);
    }
    take(text, ',');
    take(text, ' ');
  }
  return ranks;
}

std::string name_ranks(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + ranks_text(ranks);
}

namespace {

Group read_group(const GroupSlot& slot) {
  const GroupLabel label = slot.label.load();
  return {slot.id.load(), std::string(unpadded(label.name)), parse_ranks(unpadded(label.ranks)),
          slot.begun.load(), slot.thread.load()};
}

std::optional<Call> read_call(const CallSlot& slot, const RankReport& report) {
  const std::uint64_t order = slot.order.load(std::memory_order_acquire);
  const CallLabel label = slot.label.load();
  if (order == 0 || slot.order.load(std::memory_order_relaxed) != order) {
    return std::nullopt;
  }
  const Group* group = report.find_group(label.group);
  return Call{.order = order,
              .group = label.group,
              .number = label.number,
              .thread = label.thread,
              .bytes = label.bytes,
              .step = label.step,
              .group_name = group == nullptr ? "?" : group->name,
              .collective = std::string(unpadded(label.collective)),
              .purpose = std::string(unpadded(label.purpose)),
              .caller = std::string(unpadded(label.caller)),
              .state = slot.state.load(),
              .begun = label.begun,
              .waits_since = slot.waits_since.load(),
              .ended = slot.ended.load()};
}

/// Reads a record; nullptr if the file contains no record of this version.
std::unique_ptr<Record> load_record(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  auto record = std::make_unique<Record>();
  file.read(reinterpret_cast<char*>(record.get()), sizeof(Record));
  const bool whole = file.gcount() == static_cast<std::streamsize>(sizeof(Record));
  return whole && record->magic == kMagic && record->bytes == sizeof(Record) ? std::move(record)
                                                                             : nullptr;
}

/// The world's number in a file name `world-W.rank-R.flight`.
std::optional<int> world_of(const std::string& name) {
  int world = 0;
  int rank = 0;
  const bool found = std::sscanf(name.c_str(), "world-%d.rank-%d.flight", &world, &rank) == 2;
  return found && name == record_name(world, rank) ? std::optional(world) : std::nullopt;
}

}  // namespace

const Group* RankReport::find_group(std::uint64_t id) const {
  const auto found = std::ranges::find(groups, id, &Group::id);
  return found == groups.end() ? nullptr : &*found;
}

const Call* RankReport::waiting(std::int64_t thread) const {
  const Call* longest = nullptr;
  for (const Call& call : calls) {
    const bool waits = call.state == CallState::kWaiting && (thread == 0 || call.thread == thread);
    if (waits && (longest == nullptr || call.waits_since < longest->waits_since)) {
      longest = &call;
    }
  }
  return longest;
}

std::int64_t now() {
  using std::chrono::nanoseconds, std::chrono::steady_clock, std::chrono::system_clock;
  const nanoseconds steady = steady_clock::now().time_since_epoch();
  static const nanoseconds offset = nanoseconds(system_clock::now().time_since_epoch()) - steady;
  return (steady + offset).count();
}

RankReport read(const Record& record) {
  RankReport report{.rank = record.rank,
                    .size = record.size,
                    .host = std::string(unpadded(record.host)),
                    .pid = record.pid,
                    .state = record.state.load(),
                    .exit_code = record.exit_code.load(),
                    .step = record.step.load(),
                    .threads = {},
                    .activity = record.activity.load(),
                    .progress = std::nullopt,
                    .calls_begun = record.calls_begun.load(),
                    .groups = {},
                    .calls = {}};
  for (const ThreadSlot& slot : record.threads) {
    if (const std::int64_t id = slot.id.load(std::memory_order_acquire)) {
      report.threads.push_back({id, slot.worked.load(), slot.work.load()});
    }
  }
  for (const GroupSlot& slot : record.groups) {
    if (slot.id.load(std::memory_order_acquire) != 0) {
      report.groups.push_back(read_group(slot));
    }
  }
  for (const CallSlot& slot : record.calls) {
    if (auto call = read_call(slot, report)) {
      report.calls.push_back(std::move(*call));
    }
  }
  std::ranges::sort(report.calls, {}, &Call::order);
  return report;
}

std::string record_name(int world, int rank) {
  return detail::concat("world-", world, ".rank-", rank, ".flight");
}

std::vector<std::vector<RankReport>> read_records(const std::string& folder) {
  std::map<int, std::vector<RankReport>> worlds;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const auto world = world_of(entry.path().filename().string());
    if (!world) {
      continue;
    }
    const auto record = load_record(entry.path());
    TESSERA_CHECK(record != nullptr, entry.path().string(),
                  " is no flight record of this version of Tessera; read it with the tessera-run "
                  "of the version that wrote it");
    worlds[*world].push_back(read(*record));
  }
  TESSERA_CHECK(!error, "the folder ", folder, " cannot be read: ", error.message());
  TESSERA_CHECK(!worlds.empty(), "the folder ", folder,
                " holds no flight records (world-0.rank-0.flight, ...); give the folder that the "
                "watchdog or tessera-run named");
  std::vector<std::vector<RankReport>> result;
  for (auto& [world, reports] : worlds) {
    std::ranges::sort(reports, {}, &RankReport::rank);
    result.push_back(std::move(reports));
  }
  return result;
}

}  // namespace tessera::flight
