#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/core/input_file.h"
#include "tessera/export.h"

namespace at {
class Tensor;
}

TESSERA_API_BEGIN
namespace tessera::checkpoint {

/// A tensor in a safetensors file.
struct TensorEntry {
  std::string dtype_name;  ///< as in the file: "F32", "BF16", ...
  c10::ScalarType dtype;   ///< Undefined for the formats that libtorch lacks (F4, F6_*)
  std::vector<std::int64_t> sizes;
  std::uint64_t offset = 0;  ///< of the first byte, from the start of the file
  std::uint64_t bytes = 0;
};

using files::Symlinks;

/// A safetensors file, opened for reading. The constructor reads and checks the header alone. It
/// throws Error, naming the file, the tensor and the fault, for what the format forbids (overlaps,
/// holes, overflow, truncation, duplicate names, trailing bytes, unknown types) and for anything
/// but a regular file. No length is used for an allocation before it was checked against the file's
/// size. Thread safe.
class SafetensorsFile {
 public:
  /// `sums`: the CRC-32C of each MiB of the file, with which all that is read is compared; none:
  /// nothing is.
  explicit SafetensorsFile(const std::filesystem::path& path, Symlinks symlinks = Symlinks::kFollow,
                           std::vector<std::uint32_t> sums = {});
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&&) noexcept;

  const std::map<std::string, TensorEntry>& tensors() const;
  const std::map<std::string, std::string>& metadata() const;
  const std::filesystem::path& path() const;
  /// The entry of a tensor. Throws Error if there is none of this name.
  const TensorEntry& entry(const std::string& name) const;

  /// The block [offset, offset + sizes) of a tensor, contiguous, on the CPU, in the file's type.
  /// Only its bytes, and gaps of up to 64 KiB between them, are read, in long runs. Throws
  /// Error for a block outside the tensor, and for a file that changed since it was opened.
  at::Tensor read(const std::string& name, std::span<const std::int64_t> offset,
                  std::span<const std::int64_t> sizes) const;
  at::Tensor read(const std::string& name) const;
  /// Fills `block`, of any type, strides and device, with the block of a tensor at `offset`.
  /// Contiguous memory of the host and of the file's type is filled without a copy; after an error
  /// it holds a part of the bytes. Throws Error as read() does.
  void read_into(const std::string& name, std::span<const std::int64_t> offset,
                 const at::Tensor& block) const;

 private:
  /// The entry of a tensor of a known type, in which the block [offset, offset + sizes) lies.
  const TensorEntry& entry_with(const std::string& name, std::span<const std::int64_t> offset,
                                std::span<const std::int64_t> sizes) const;
  /// The block at `offset` to the contiguous memory of `out`.
  void read_bytes(const TensorEntry& item, std::span<const std::int64_t> offset,
                  const at::Tensor& out) const;

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Writes a safetensors file piece by piece, so that no more than a piece is in memory. The bytes
/// are those of the reference implementation. They go to a temporary file beside `path`, for which
/// the constructor reserves room on the disk. Without finish() the file is removed; the file of a
/// killed process is removed by the next writer. Thread safety: one thread at a time.
class SafetensorsWriter {
 public:
  /// A tensor of the file to be written.
  struct Item {
    std::string name;
    c10::ScalarType dtype;
    std::vector<std::int64_t> sizes;
  };
  /// Called with bytes that were written, and where in the file.
  using OnWrite = std::function<void(std::uint64_t offset, std::span<const std::byte> bytes)>;
  /// Throws Error for duplicate or unfit names, a type that the format lacks, or no room.
  SafetensorsWriter(const std::filesystem::path& path, const std::vector<Item>& items,
                    const std::map<std::string, std::string>& metadata = {{"format", "pt"}},
                    OnWrite on_write = {});
  ~SafetensorsWriter();
  SafetensorsWriter(SafetensorsWriter&&) noexcept;

  /// In the order in which the tensors lie in the file.
  std::vector<std::string> names() const;
  /// Writes a whole tensor, on any device, with any strides. Tensors may come in any order.
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
TESSERA_API_END
