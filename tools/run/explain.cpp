#include "explain.h"

#include <algorithm>
#include <filesystem>
#include <ostream>
#include <vector>

#include "tessera/core/detail/flight_report.h"

namespace tessera::run {
namespace {

/// The ranks of the job that wrote nothing here, as those of other nodes.
std::vector<int> ranks_without_record(const std::vector<flight::RankReport>& reports) {
  std::vector<int> ranks;
  for (int rank = 0; rank < reports.front().size; ++rank) {
    if (std::ranges::find(reports, rank, &flight::RankReport::rank) == reports.end()) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

}  // namespace

void explain(const std::string& folder, std::ostream& out) {
  const auto worlds = flight::read_records(folder);
  for (std::size_t world = 0; world < worlds.size(); ++world) {
    const std::vector<flight::RankReport>& reports = worlds[world];
    out << (worlds.size() == 1 ? "" : "world " + std::to_string(world) + ", ") << "records of "
        << reports.size() << " of " << reports.front().size << " ranks\n";
    for (const std::string& line : flight::explain(reports)) {
      out << "  " << line << '\n';
    }
    if (const auto missing = ranks_without_record(reports); !missing.empty()) {
      out << "  no record here of " << flight::name_ranks(missing)
          << ": copy those of all nodes into one folder\n";
    }
  }
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".txt") {
      out << "stacks and recent calls of each rank are in " << folder << "/*.txt\n";
      break;
    }
  }
}

}  // namespace tessera::run
