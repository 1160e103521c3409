// Inspection of saved steps in one process: describe, verify, compare.

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <set>

#include "step_folder.h"
#include "stored_step.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

constexpr std::int64_t kMostBlockBytes = std::int64_t{8} << 20;
/// The largest number of elements that are compared at once. A limit in bytes alone would not bound
/// the memory, because comparisons convert small dtypes to wider dtypes.
constexpr std::int64_t kMostBlockElements = std::int64_t{2} << 20;

/// Returns the tensors that have bytes in the range [begin, end) of a file, as text. The text
/// contains the position of the first such byte in each tensor.
std::string tensors_at(const SafetensorsFile& file, std::uint64_t begin, std::uint64_t end) {
  std::vector<std::string> names;
  for (const auto& [name, entry] : file.tensors()) {
    if (entry.offset < end && begin < entry.offset + entry.bytes) {
      names.push_back(
          fmt::format("'{}' from byte {}", name, begin > entry.offset ? begin - entry.offset : 0));
    }
  }
  return names.empty() ? "" : fmt::format(" (tensors {})", fmt::join(names, ", "));
}

Manifest manifest_to_inspect(const std::filesystem::path& folder) {
  TESSERA_CHECK(!has_torch_hf_shards(folder), "'", folder.string(), "' has shards but no ",
                kManifestFile,
                ", so there are no checksums to verify: load the shards and save a step");
  if (lacks_manifest(folder)) {
    refuse_torch_checkpoint(folder);
  }
  return read_manifest(folder);
}

class Verification {
 public:
  explicit Verification(const std::filesystem::path& folder)
      : folder_(folder), manifest_(manifest_to_inspect(folder)) {}

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
        faults_.push_back(fmt::format("bytes {} to {} of '{}' differ from the saved bytes{}", begin,
                                      begin + bytes.size() - 1, file.path().string(),
                                      names_at(file.path(), begin, begin + bytes.size())));
      }
    }
  }

  static std::string names_at(const std::filesystem::path& path, std::uint64_t begin,
                              std::uint64_t end) {
    try {
      return tensors_at(SafetensorsFile(path, Symlinks::kRefuse), begin, end);
    } catch (const Error&) {
      return " (header)";
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

  /// Reports shard files that the manifest does not list, because PyTorch's reader reads every
  /// shard in the folder.
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
      step.string(), manifest.step, ascii(manifest.run_id), manifest.world_size,
      fmt::join(manifest.mesh_sizes, ", "), manifest.tensors.size(), manifest.files.size(), bytes,
      ascii(manifest.entries));
  for (const auto& [name, state] : manifest.stateful.items()) {
    text += fmt::format("object {} {}\n", ascii(name), ascii(state));
  }
  for (const auto& [name, states] : manifest.rank_states.items()) {
    text += fmt::format("object {} of each rank {}\n", ascii(name), ascii(states));
  }
  for (const auto& [name, tensor] : manifest.tensors) {
    text += fmt::format("{} {} [{}] in {} chunks\n", name, tensor.dtype,
                        fmt::join(tensor.sizes, ", "), tensor.chunks.size());
  }
  return text;
}

std::vector<std::string> verify_step(const std::filesystem::path& step) {
  return Verification(step).run();
}

namespace {

/// The largest absolute and the largest relative difference between elements of two tensors.
struct Difference {
  bool found = false;
  double absolute = 0;
  double relative = 0;  ///< the absolute difference divided by the larger absolute value

  /// Compares two blocks and updates the largest differences. A NaN in only one of the blocks, and
  /// unequal infinities, count as an infinite difference.
  void add(const at::Tensor& a, const at::Tensor& b) {
    if (a.numel() == 0 || at::equal(a, b)) {
      return;
    }
    const at::Tensor x = a.to(a.is_complex() ? at::kComplexDouble : at::kDouble);
    const at::Tensor y = b.to(b.is_complex() ? at::kComplexDouble : at::kDouble);
    const at::Tensor same = x.eq(y).logical_or(x.isnan().logical_and(y.isnan()));
    // at::equal() has found that integer blocks differ. `same` can miss this difference, because
    // different integers above 2^53 can be equal as doubles.
    found = found || c10::isIntegralType(a.scalar_type(), /*includeBool=*/true) ||
            !same.all().item<bool>();
    const double infinity = std::numeric_limits<double>::infinity();
    const at::Tensor apart = x.sub(y).abs().nan_to_num(infinity, infinity).masked_fill(same, 0.0);
    const at::Tensor ratio =
        apart.div(at::maximum(x.abs(), y.abs())).nan_to_num(infinity).masked_fill(same, 0.0);
    absolute = std::max(absolute, apart.max().item<double>());
    relative = std::max(relative, ratio.max().item<double>());
  }
};

/// Returns the dtype in which tensors of `dtype` are compared: fp32 for 8-bit floating-point
/// dtypes, because libtorch cannot compare these with other dtypes.
c10::ScalarType compared_type(const std::string& dtype) {
  const c10::ScalarType type = find_dtype(dtype)->scalar_type;
  return c10::isFloat8Type(type) ? c10::kFloat : type;
}

class StepComparison {
 public:
  StepComparison(const std::filesystem::path& step, const std::filesystem::path& other)
      : one_(step, manifest_in(step)), other_(other, manifest_in(other)) {
    for (const auto& [name, tensor] : one_.manifest().tensors) {
      compare_described(name, tensor);
    }
    for (const auto& [name, tensor] : other_.manifest().tensors) {
      if (!one_.manifest().tensors.contains(name)) {
        add(name, "only in the second");
      }
    }
  }

  void compare_values() {
    for (const std::string& name : comparable_) {
      const ManifestTensor& tensor = *one_.find(name);
      const c10::ScalarType type = compared_type(tensor.dtype);
      const c10::ScalarType other_type = compared_type(other_.find(name)->dtype);
      const auto element_bytes = static_cast<std::int64_t>(c10::elementSize(type));
      const std::int64_t most = std::min(kMostBlockElements, kMostBlockBytes / element_bytes);
      Difference difference;
      for_each_piece(tensor.sizes, most, [&](auto offset, auto sizes) {
        difference.add(one_.values(name, offset, sizes, type),
                       other_.values(name, offset, sizes, other_type));
      });
      if (difference.found) {
        add(name, fmt::format("largest difference {:.6g}, relative {:.6g}", difference.absolute,
                              difference.relative));
      }
    }
  }

  std::vector<std::string> lines() const {
    std::vector<std::string> lines;
    for (const auto& [name, faults] : faults_) {
      lines.push_back(fmt::format("{}: {}", name, fmt::join(faults, "; ")));
    }
    return lines;
  }

 private:
  void add(const std::string& name, std::string fault) {
    faults_[name].push_back(std::move(fault));
  }

  void compare_described(const std::string& name, const ManifestTensor& tensor) {
    const auto found = other_.manifest().tensors.find(name);
    if (found == other_.manifest().tensors.end()) {
      return add(name, "only in the first");
    }
    const ManifestTensor& same = found->second;
    if (tensor.dtype != same.dtype) {
      add(name, tensor.dtype + " and " + same.dtype);
    }
    if (tensor.sizes != same.sizes) {
      return add(name, fmt::format("[{}] and [{}]", fmt::join(tensor.sizes, ", "),
                                   fmt::join(same.sizes, ", ")));
    }
    comparable_.insert(name);
  }

  StoredStep one_, other_;
  std::set<std::string> comparable_;
  std::map<std::string, std::vector<std::string>> faults_;
};

}  // namespace

std::vector<std::string> compare_steps(const std::filesystem::path& step,
                                       const std::filesystem::path& other) {
  StepComparison comparison(step, other);
  comparison.compare_values();
  return comparison.lines();
}

}  // namespace tessera::checkpoint
