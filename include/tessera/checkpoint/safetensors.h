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
  c10::ScalarType dtype;
  std::vector<std::int64_t> sizes;
  std::uint64_t offset = 0;  ///< of the first byte, from the start of the file
  std::uint64_t bytes = 0;
};

/// A safetensors file, opened for reading. The constructor reads and checks the header only, and
/// rejects whatever the format forbids (overlaps, holes, overflow, truncation, duplicate names,
/// trailing bytes, unknown types): Error names the file, the tensor and the fault.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&&) noexcept;

  const std::map<std::string, TensorEntry>& tensors() const;
  const std::map<std::string, std::string>& metadata() const;
  const std::filesystem::path& path() const;
  /// Reads the block [offset, offset + sizes) of a tensor: only those bytes (pread), in runs.
  at::Tensor read(const std::string& name, std::span<const std::int64_t> offset,
                  std::span<const std::int64_t> sizes) const;
  at::Tensor read(const std::string& name) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Writes a safetensors file tensor by tensor, so that no more than one is in memory. Everything
/// goes to a temporary file beside `path`, which finish() makes durable and renames; without
/// finish() nothing is left behind.
class SafetensorsWriter {
 public:
  struct Item {
    std::string name;
    c10::ScalarType dtype;
    std::vector<std::int64_t> sizes;
  };
  SafetensorsWriter(const std::filesystem::path& path, const std::vector<Item>& items,
                    const std::map<std::string, std::string>& metadata = {});
  ~SafetensorsWriter();
  /// The tensors come in the order of `items`.
  void write(const std::string& name, const at::Tensor& tensor);
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::checkpoint
