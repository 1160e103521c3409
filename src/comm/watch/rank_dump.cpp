#include "watch/rank_dump.h"

#include <exception>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <sstream>

#include "tessera/core/atomic_file.h"
#include "tessera/core/detail/flight_report.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

const char* name_of_state(flight::CallState state) {
  switch (state) {
    case flight::CallState::kBegun:
      return "begun";
    case flight::CallState::kWaiting:
      return "waiting";
    case flight::CallState::kDone:
      return "done";
    case flight::CallState::kFailed:
      return "failed";
  }
  return "unknown";
}

std::string dump_text(const flight::RankReport& report, const std::string& stacks) {
  constexpr std::int64_t kNanosecondsPerMillisecond = 1'000'000;
  constexpr int kTimeWidth = 10;
  const std::int64_t now = flight::now();
  std::ostringstream text;
  text
      << "rank " << report.rank << " of " << report.size << ", pid " << report.pid << " on "
      << report.host << ", " << flight::progress_text(report) << "\n\n"
      << "The last collectives: milliseconds since they began, state, bytes of this rank's input\n";
  for (const flight::Call& call : report.calls) {
    text << std::setw(kTimeWidth) << (now - call.begun) / kNanosecondsPerMillisecond << "  "
         << name_of_state(call.state) << "  " << call.bytes << "  " << flight::to_text(call);
    if (call.step >= 0) {
      text << ", after step " << call.step;
    }
    text << '\n';
  }
  text << '\n' << stacks;
  return text.str();
}

/// Whether `path` is the file that the record is mapped from.
bool is_record_file(const std::string& path, const flight::Record& record) {
  std::ifstream file(path, std::ios::binary);
  flight::Record found;
  const auto bytes = static_cast<std::streamsize>(offsetof(flight::Record, rank));
  return file.read(reinterpret_cast<char*>(&found), bytes) && found.token == record.token;
}

}  // namespace

void write_dump(const std::string& folder, int world, const flight::Record& record,
                const std::string& stacks) {
  try {
    std::filesystem::create_directories(folder);
    const std::string name = flight::record_name(world, record.rank);
    const std::string path = folder + "/" + name;
    if (!is_record_file(path, record)) {
      files::write_file(path, std::string(reinterpret_cast<const char*>(&record), sizeof record));
    }
    files::write_file(std::filesystem::path(path).replace_extension(".txt"),
                      dump_text(flight::read(record), stacks));
  } catch (const std::exception&) {
    // See the header.
  }
}

std::string device_record_path(const std::string& folder, int rank) {
  return folder + "/nccl_trace_rank_" + std::to_string(rank);
}

void write_device_record(const std::string& folder, int rank, const std::string& record) {
  try {
    files::write_file(device_record_path(folder, rank), record);
  } catch (const std::exception&) {
    // As above.
  }
}

}  // namespace tessera::comm
