// Reads the records that the ranks of a job wrote.

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tessera/core/detail/flight_report.h"
#include "tessera/core/flight.h"

namespace tessera::flight {
namespace {

/// The ranks of the job that wrote nothing here, as those of other nodes.
std::vector<int> ranks_without_record(const std::vector<RankReport>& reports) {
  std::vector<int> ranks;
  for (int rank = 0; rank < reports.front().size; ++rank) {
    if (find_rank(reports, rank) == nullptr) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

std::int64_t last_time(const RankReport& report) {
  std::int64_t last = 0;
  for (const Call& call : report.calls) {
    last = std::max({last, call.begun, call.ended});
  }
  return last;
}

/// Leaves those out that are of an earlier start of the job with another number of ranks, which a
/// folder still has. A line says so for each number.
void leave_out_other_starts(std::vector<RankReport>& reports, std::vector<std::string>& lines) {
  const int size = std::ranges::max_element(reports, {}, last_time)->size;
  std::map<int, std::vector<int>> others;
  for (const RankReport& report : reports) {
    if (report.size != size) {
      others[report.size].push_back(report.rank);
    }
  }
  for (const auto& [of, ranks] : others) {
    lines.push_back("  left out: " + name_ranks(ranks) + " of a start with " + std::to_string(of) +
                    " ranks");
  }
  std::erase_if(reports, [size](const RankReport& report) { return report.size != size; });
}

/// A stopped process that the job's end has ended needs no advice how it continues.
void forget_ended_processes(std::vector<RankReport>& reports) {
  std::array<char, sizeof(Record::host)> host{};
  gethostname(host.data(), host.size() - 1);
  for (RankReport& report : reports) {
    const bool ended = kill(static_cast<pid_t>(report.pid), 0) != 0 && errno == ESRCH;
    if (report.activity == Activity::kStopped && report.host == host.data() && ended) {
      report.pid = 0;
    }
  }
}

void explain_world(std::vector<RankReport> reports, const std::string& name,
                   std::vector<std::string>& lines) {
  std::vector<std::string> others;
  leave_out_other_starts(reports, others);
  forget_ended_processes(reports);
  lines.push_back(name + "records of " + std::to_string(reports.size()) + " of " +
                  std::to_string(reports.front().size) + " ranks");
  for (const std::string& line : explain(reports)) {
    lines.push_back("  " + line);
  }
  lines.insert(lines.end(), others.begin(), others.end());
  if (const auto missing = ranks_without_record(reports); !missing.empty()) {
    lines.push_back("  no record here of " + name_ranks(missing) +
                    ": copy those of all nodes into one folder");
  }
}

}  // namespace

std::vector<std::string> explain_records(const std::string& folder) {
  std::vector<std::string> lines;
  const auto worlds = read_records(folder);
  for (std::size_t world = 0; world < worlds.size(); ++world) {
    explain_world(worlds[world], worlds.size() == 1 ? "" : "world " + std::to_string(world) + ", ",
                  lines);
  }
  const std::filesystem::directory_iterator entries(folder);
  if (std::ranges::any_of(entries,
                          [](const auto& entry) { return entry.path().extension() == ".txt"; })) {
    lines.push_back("stacks and recent calls of each rank are in " + folder + "/*.txt");
  }
  return lines;
}

}  // namespace tessera::flight
