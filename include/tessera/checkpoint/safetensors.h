#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace at {
class Tensor;
}

namespace tessera::checkpoint {

/// Where a tensor lies in a safetensors file.
struct TensorEntry {
  std::string dtype_name;  ///< as in the file: "F32", "BF16", ...
  c10::ScalarType dtype;   ///< Undefined for the formats that libtorch lacks (F4, F6_*)
  std::vector<std::int64_t> sizes;
  std::uint64_t offset = 0;  ///< of the first byte, from the start of the file
  std::uint64_t bytes = 0;
};

enum class Symlinks { kFollow, kRefuse };

/// A safetensors file, opened for reading. The constructor reads and checks the header only, and
/// rejects whatever the format forbids (overlaps, holes, overflow, truncation, duplicate names,
/// trailing bytes, unknown types) and anything but a regular file: Error names the file, the tensor
/// and the fault. Nothing is allocated by a length that was not checked against the file's size.
/// Threads may read one file together.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path,
                           Symlinks symlinks = Symlinks::kFollow);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&&) noexcept;

  const std::map<std::string, TensorEntry>& tensors() const;
  const std::map<std::string, std::string>& metadata() const;
  const std::filesystem::path& path() const;
  /// The entry of a tensor. Throws Error if there is none of this name.
  const TensorEntry& entry(const std::string& name) const;

  /// Reads the block [offset, offset + sizes) of a tensor, contiguous, on the CPU, in the file's
  /// type: only those bytes (and gaps of less than a page between them) are read, in long runs.
  /// Throws Error for a block outside the tensor and for a file that changed since it was opened.
  at::Tensor read(const std::string& name, std::span<const std::int64_t> offset,
                  std::span<const std::int64_t> sizes) const;
  at::Tensor read(const std::string& name) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Writes a safetensors file piece by piece, so that no more than a piece is in memory. Its bytes
/// are those that the reference implementation writes. Everything goes to a temporary file beside
/// `path`; without finish() nothing is left behind, and what a killed writer left is removed by the
/// next one. Room on the disk is reserved at the start.
class SafetensorsWriter {
 public:
  struct Item {
    std::string name;
    c10::ScalarType dtype;
    std::vector<std::int64_t> sizes;
  };
  /// Throws Error for duplicate or unfit names, a type that the format lacks, or no room.
  SafetensorsWriter(const std::filesystem::path& path, const std::vector<Item>& items,
                    const std::map<std::string, std::string>& metadata = {{"format", "pt"}});
  ~SafetensorsWriter();
  SafetensorsWriter(SafetensorsWriter&&) noexcept;

  /// Writes a whole tensor (of any device and strides), in any order of names.
  void write(const std::string& name, const at::Tensor& tensor);
  /// Writes the block of a tensor that starts at `offset`. Blocks must not overlap.
  void write(const std::string& name, std::span<const std::int64_t> offset,
             const at::Tensor& block);

  /// seal() and publish().
  void finish();
  /// Checks that every element was written and makes the file durable, under its temporary name.
  void seal();
  /// Renames the sealed file to its own name, replacing an older one.
  void publish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::checkpoint
