// Reads the records that the ranks of a job wrote.

#include <algorithm>
#include <filesystem>
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

void explain_world(const std::vector<RankReport>& reports, const std::string& name,
                   std::vector<std::string>& lines) {
  lines.push_back(name + "records of " + std::to_string(reports.size()) + " of " +
                  std::to_string(reports.front().size) + " ranks");
  for (const std::string& line : explain(reports)) {
    lines.push_back("  " + line);
  }
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
