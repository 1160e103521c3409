#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/checkpoint/detail/tensor_entry.h"
#include "tessera/core/detail/files.h"
#include "tessera/export.h"

namespace at {
class Tensor;
}

TESSERA_API_BEGIN
namespace tessera::checkpoint {

using files::Symlinks;

/// A safetensors file, opened for reading. The constructor reads and checks only the header. Throws
/// Error for everything that the format forbids, and if the path is not a regular file. Thread
/// safe.
class SafetensorsFile {
 public:
  /// `sums`: the CRC-32C of each MiB of the file; every read verifies its bytes with these
  /// checksums. If `sums` is empty, nothing is verified.
  explicit SafetensorsFile(const std::filesystem::path& path, Symlinks symlinks = Symlinks::kFollow,
                           std::vector<std::uint32_t> sums = {});
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&&) noexcept;

  const std::map<std::string, TensorEntry>& tensors() const;
  const std::map<std::string, std::string>& metadata() const;
  const std::filesystem::path& path() const;
  /// Returns the dtype, the sizes and the position of tensor `name`. Throws Error for an unknown
  /// name.
  const TensorEntry& entry(const std::string& name) const;

  /// Returns the block [offset, offset + sizes) of a tensor: contiguous, on the CPU, in the dtype
  /// of the file. Parts of the block that are at most 64 KiB apart in the file are read together.
  /// Throws Error if the block is outside the tensor, or if the file has changed since it was
  /// opened.
  at::Tensor read(const std::string& name, std::span<const std::int64_t> offset,
                  std::span<const std::int64_t> sizes) const;
  at::Tensor read(const std::string& name) const;
  /// Fills `block` (any dtype, strides and device) with the tensor's block at `offset`. Throws the
  /// errors of read(). After an error `block` can be partly overwritten.
  void read_into(const std::string& name, std::span<const std::int64_t> offset,
                 const at::Tensor& block) const;

 private:
  const TensorEntry& entry_with(const std::string& name, std::span<const std::int64_t> offset,
                                std::span<const std::int64_t> sizes) const;
  void read_bytes(const TensorEntry& item, std::span<const std::int64_t> offset,
                  const at::Tensor& out) const;

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::checkpoint
TESSERA_API_END
