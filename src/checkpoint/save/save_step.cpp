// A save in steps that all ranks end together: make the folder; write; commit. Code that can fail
// on one rank runs inside run_or_fail_on_all().

#include "save/save_step.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "all_ranks.h"
#include "save/write_shards.h"
#include "step/manifest.h"
#include "tessera/comm/agreement.h"

namespace tessera::checkpoint {
namespace {

/// One line a file, for rank 0: its name, size and checksums.
std::string to_lines(const std::vector<FileRecord>& records) {
  std::ostringstream lines;
  for (const FileRecord& record : records) {
    lines << record.name << ' ' << record.bytes << ' ' << record.sums.size();
    for (const std::uint32_t sum : record.sums) {
      lines << ' ' << sum;
    }
    lines << '\n';
  }
  return lines.str();
}

/// Sets the files' records from the lines of all ranks.
void complete_files(Manifest& manifest, const std::vector<std::string>& lines) {
  std::map<std::string, FileRecord*> by_name;
  for (FileRecord& file : manifest.files) {
    by_name.emplace(file.name, &file);
  }
  for (const std::string& of_rank : lines) {
    std::istringstream in(of_rank);
    std::string name;
    while (in >> name) {
      FileRecord& file = *by_name.at(name);
      std::size_t count = 0;
      in >> file.bytes >> count;
      file.sums.resize(count);
      for (std::uint32_t& sum : file.sums) {
        in >> sum;
      }
    }
  }
}

/// Writes everything and commits. The records of all ranks reach rank 0 as text. `committed` is set
/// on rank 0 as soon as the step exists.
void write_and_commit(comm::Communicator& hosts, PreparedSave& save, bool& committed) {
  std::vector<FileRecord> records;
  run_or_fail_on_all(hosts, [&] { records = write_shards(save.folder.path(), save.files); });
  const auto lines = comm::gather_texts(hosts, c10::kCPU, to_lines(records));
  run_or_fail_on_all(hosts, [&] {
    if (hosts.rank() == 0) {
      complete_files(save.manifest, lines);
      const std::string text = to_text(save.manifest);
      parse_manifest(text,
                     save.folder.path() / kManifestFile);  // commit nothing that load() refuses
      save.folder.commit(text);
      committed = true;
    }
  });
}

/// The step exists: a failure from here on only wastes disk space.
void tidy_up(const StepFolder& folder, int keep) noexcept {
  try {
    folder.release();
    folder.clean_up_others(keep);
  } catch (const std::exception& error) {
    TORCH_WARN("the checkpoint was saved, but others could not be removed: ", error.what());
  }
}

}  // namespace

void save_step(comm::Communicator& hosts, PreparedSave save) {
  const at::NoGradGuard no_grad;
  run_or_fail_on_all(hosts, [&] {
    if (hosts.rank() == 0) {
      save.folder.claim();
    }
  });
  bool committed = false;
  try {
    write_and_commit(hosts, save, committed);
  } catch (const comm::PeerError&) {
    // The others may still write, or have committed: the next save removes the remains.
    throw;
  } catch (...) {
    if (hosts.rank() == 0 && !committed) {
      save.folder.discard();
    }
    throw;
  }
  if (hosts.rank() == 0) {
    tidy_up(save.folder, save.keep);
  }
}

}  // namespace tessera::checkpoint
