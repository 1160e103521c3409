#include "tessera/checkpoint/inspect.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <utility>

#include "checksum/granules.h"
#include "step/files_of_step.h"
#include "step/manifest.h"
#include "step/shards_of_others.h"
#include "step/step_folder.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"
#include "tessera/core/input_file.h"

namespace tessera::checkpoint {
namespace {

/// The tensors that have bytes in [begin, end) of a file, and where these begin in each.
std::string tensors_at(const SafetensorsFile& file, std::uint64_t begin, std::uint64_t end) {
  std::vector<std::string> names;
  for (const auto& [name, entry] : file.tensors()) {
    if (entry.offset < end && begin < entry.offset + entry.bytes) {
      names.push_back(
          fmt::format("'{}' from byte {}", name, begin > entry.offset ? begin - entry.offset : 0));
    }
  }
  return names.empty() ? "" : fmt::format(", of tensors {}", fmt::join(names, ", "));
}

Manifest manifest_to_inspect(const std::filesystem::path& folder) {
  TESSERA_CHECK(!has_shards_of_others(folder), "'", folder.string(), "' has shards, but no ",
                kManifestFile,
                ", and so has no checksums to verify: load it and save it as a step");
  if (lacks_manifest(folder)) {
    refuse_torch_checkpoint(folder);
  }
  return read_manifest(folder);
}

/// It may come from a stranger, and goes to a terminal.
std::string escaped(const nlohmann::json& value) {
  return value.dump(-1, ' ', /*ensure_ascii=*/true);
}

class Verification {
 public:
  Verification(const std::filesystem::path& folder, const Progress& progress)
      : folder_(folder), manifest_(manifest_to_inspect(folder)), progress_(progress) {
    for (const FileRecord& file : manifest_.files) {
      all_ += file.bytes;
    }
  }

  std::vector<std::string> run() {
    for (std::size_t i = 0; i < manifest_.files.size(); ++i) {
      try {
        check_bytes(manifest_.files[i]);
        check_header(i);
      } catch (const Error& error) {
        faults_.emplace_back(error.what());
      }
    }
    check_others();
    return std::move(faults_);
  }

 private:
  void check_bytes(const FileRecord& record) {
    const files::InputFile file(folder_ / record.name, "a file of the step",
                                files::Symlinks::kRefuse);
    TESSERA_CHECK(file.size() == record.bytes, "'", file.path().string(), "' has ", file.size(),
                  " bytes, but the manifest says ", record.bytes);
    std::vector<std::byte> buffer(kGranuleBytes);
    for (std::size_t i = 0; i < record.sums.size(); ++i) {
      const std::uint64_t begin = i * kGranuleBytes;
      const auto bytes = std::span(buffer).first(std::min(kGranuleBytes, record.bytes - begin));
      if (read_and_sum(file, begin, bytes) != record.sums[i]) {
        faults_.push_back(fmt::format("bytes {} to {} of '{}' are not those that were written{}",
                                      begin, begin + bytes.size() - 1, file.path().string(),
                                      names_at(file.path(), begin, begin + bytes.size())));
      }
      done_ += bytes.size();
      if (progress_) {
        progress_(done_, all_);
      }
    }
  }

  /// As far as the header can still be read.
  static std::string names_at(const std::filesystem::path& path, std::uint64_t begin,
                              std::uint64_t end) {
    try {
      return tensors_at(SafetensorsFile(path, Symlinks::kRefuse), begin, end);
    } catch (const Error&) {
      return ", in its header";
    }
  }

  void check_header(std::size_t index) {
    const SafetensorsFile file(folder_ / manifest_.files[index].name, Symlinks::kRefuse);
    std::size_t expected = 0;
    for (const auto& [name, tensor] : manifest_.tensors) {
      for (const ManifestChunk& chunk : tensor.chunks) {
        if (chunk.file == index) {
          ++expected;
          check_entry(file, name, tensor, chunk);
        }
      }
    }
    TESSERA_CHECK(expected == file.tensors().size(), "'", file.path().string(), "' has ",
                  file.tensors().size(), " tensors, but the manifest says ", expected);
  }

  /// PyTorch's reader takes every shard that it finds.
  void check_others() {
    std::set<std::string> known;
    for (const FileRecord& file : manifest_.files) {
      known.insert(file.name);
    }
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      const std::string name = entry.path().filename().string();
      if (name.ends_with(".safetensors") && !known.contains(name)) {
        faults_.push_back(fmt::format("'{}' is not in the manifest", entry.path().string()));
      }
    }
  }

  std::filesystem::path folder_;
  Manifest manifest_;
  const Progress& progress_;
  std::uint64_t done_ = 0, all_ = 0;
  std::vector<std::string> faults_;
};

}  // namespace

std::string describe_step(const std::filesystem::path& step) {
  const Manifest manifest = manifest_to_inspect(step);
  std::uint64_t bytes = 0;
  for (const FileRecord& file : manifest.files) {
    bytes += file.bytes;
  }
  std::string text = fmt::format(
      "{}\nstep {} of run {}, saved by {} ranks on the mesh ({})\n{} tensors, {} files, {} "
      "bytes\n"
      "entries {}\n",
      step.string(), manifest.step, escaped(manifest.run_id), manifest.world_size,
      fmt::join(manifest.mesh_sizes, ", "), manifest.tensors.size(), manifest.files.size(), bytes,
      escaped(manifest.entries));
  for (const auto& [name, state] : manifest.stateful.items()) {
    text += fmt::format("object {} {}\n", escaped(name), escaped(state));
  }
  for (const auto& [name, states] : manifest.rank_states.items()) {
    text += fmt::format("object {} of each rank {}\n", escaped(name), escaped(states));
  }
  for (const auto& [name, tensor] : manifest.tensors) {
    text += fmt::format("{} {} [{}] in {} chunks\n", name, tensor.dtype,
                        fmt::join(tensor.sizes, ", "), tensor.chunks.size());
  }
  return text;
}

std::vector<std::string> verify_step(const std::filesystem::path& step, const Progress& progress) {
  return Verification(step, progress).run();
}

}  // namespace tessera::checkpoint
