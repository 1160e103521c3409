// Functions that readers and writers of checkpoint files share: blocks of tensors, checksums of
// files, types and names of tensors, and the writer of safetensors files.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/detail/files.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/detail/rounding.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// Returns the product of `sizes`, which is the number of elements.
std::int64_t product(std::span<const std::int64_t> sizes);

/// Throws Error unless the block [offset, offset + block) is inside a tensor of `sizes`.
void check_block(std::span<const std::int64_t> sizes, std::span<const std::int64_t> offset,
                 std::span<const std::int64_t> block);

/// Calls `visit(element, count)` for each contiguous range of the block [offset, offset + block) of
/// a row-major tensor of `sizes`. `element`: the flat index of the range's first element.
void for_each_run(std::span<const std::int64_t> sizes, std::span<const std::int64_t> offset,
                  std::span<const std::int64_t> block,
                  const std::function<void(std::int64_t element, std::int64_t count)>& visit);

/// Large blocks are read and written in pieces of at most this many bytes, so that temporary copies
/// (on the host, or converted to another dtype) are small.
inline constexpr std::int64_t kMostPieceBytes = std::int64_t{32} << 20;

/// Calls `visit(offset, sizes)` for pieces of a block of `sizes`, in row-major order. A piece has
/// at most `most_elements` elements, in whole rows or within one row.
void for_each_piece(std::span<const std::int64_t> sizes, std::int64_t most_elements,
                    const std::function<void(std::span<const std::int64_t> offset,
                                             std::span<const std::int64_t> sizes)>& visit);

/// Returns `from + by`, elementwise.
std::vector<std::int64_t> moved(std::span<const std::int64_t> from,
                                std::span<const std::int64_t> by);

/// Returns the blocks of a tensor that this rank stores: one block for a plain tensor, none if the
/// rank is not on the tensor's mesh.
std::vector<Box> owned_blocks(const at::Tensor& tensor);
at::Tensor block_at(const at::Tensor& tensor, std::span<const std::int64_t> offset,
                    std::span<const std::int64_t> sizes);
/// Returns a view of the block of the local tensor that `box` describes.
at::Tensor local_block(const at::Tensor& local, const Box& box);

inline constexpr std::uint64_t kGranuleBytes = std::uint64_t{1} << 20;

/// Returns the number of 1 MiB blocks (granules) in a file; the last block can be shorter.
constexpr std::uint64_t granules_of(std::uint64_t bytes) {
  return tessera::detail::ceil_div(bytes, kGranuleBytes);
}

/// Reads up to 1 MiB at `offset` of a file into `out`. Returns the CRC-32C of these bytes.
std::uint32_t read_and_sum(const files::InputFile& file, std::uint64_t offset,
                           std::span<std::byte> out);

/// Computes the CRC-32C of each 1 MiB block of a file that is written from start to end.
class GranuleSums {
 public:
  /// Adds `bytes`, which are at `offset` of the file, to the sums. Throws Error unless the bytes of
  /// the previous call end at `offset`.
  void add(std::uint64_t offset, std::span<const std::byte> bytes);

  std::uint64_t bytes() const { return bytes_; }
  const std::vector<std::uint32_t>& sums() const { return sums_; }

 private:
  std::uint64_t bytes_ = 0;
  std::vector<std::uint32_t> sums_;
};

/// A data type of the safetensors format, and the corresponding type of libtorch.
struct SafetensorsDtype {
  std::string_view name;
  c10::ScalarType scalar_type;
};

/// Finds a data type by its name in safetensors; nullptr if no type has this name.
const SafetensorsDtype* find_dtype(std::string_view name);
/// Finds the safetensors type for a type of libtorch; nullptr if safetensors lacks the type.
const SafetensorsDtype* find_dtype(c10::ScalarType type);

/// Returns the size in bytes of a tensor of `sizes`. Throws Error if the size in bytes or the
/// product of the nonzero sizes overflows 64 bits.
std::uint64_t tensor_bytes(std::span<const std::int64_t> sizes, const SafetensorsDtype& dtype);

/// Whether UTF-8 text has a control character or a bidirectional override. A terminal could display
/// such text as a different name.
bool has_control_character(std::string_view text);

/// Returns JSON as ASCII text for messages, because JSON from a file can contain any characters.
std::string ascii(const nlohmann::json& value);

/// Throws Error for an unsafe tensor name: empty, longer than 4 KiB, "__metadata__", or with a
/// control character, a bidirectional override, a path separator or "..".
void check_tensor_name(std::string_view name);

/// Returns the natural number in the JSON `value`. Throws Error for other values and above 2^63 -
/// 1. `what`: the subject of the error message, for example "its shape".
std::int64_t natural_number(const nlohmann::json& value, const char* what);

/// Parses a list of natural numbers, one number for each dimension of a tensor. Throws Error for
/// more dimensions than libtorch's operators support.
std::vector<std::int64_t> natural_numbers(const nlohmann::json& value, const char* what);

/// Writes a safetensors file block by block, to bound the memory. The constructor reserves disk
/// space for a temporary file. finish() renames the temporary file to `path`. Not thread safe.
class SafetensorsWriter {
 public:
  struct Item {
    std::string name;
    c10::ScalarType dtype;
    std::vector<std::int64_t> sizes;
  };
  /// Throws Error for invalid or duplicate names, unsupported dtypes, or a full disk. A non-null
  /// `sums` receives all bytes of the file. Tensors must then be written in the order of names().
  SafetensorsWriter(const std::filesystem::path& path, const std::vector<Item>& items,
                    const std::map<std::string, std::string>& metadata = {{"format", "pt"}},
                    GranuleSums* sums = nullptr);
  ~SafetensorsWriter();
  SafetensorsWriter(SafetensorsWriter&&) noexcept;

  /// Returns the names of the tensors, in the order in which the file stores the tensors.
  std::vector<std::string> names() const;
  /// Writes a whole tensor, from any device and with any strides. Any order of tensors is possible.
  void write(const std::string& name, const at::Tensor& tensor);
  /// Writes the block of a tensor that begins at `offset`. Blocks must not overlap.
  void write(const std::string& name, std::span<const std::int64_t> offset,
             const at::Tensor& block);

  void finish();
  /// Checks that every element was written, and makes the temporary file durable (fsync).
  void seal();
  /// Renames the temporary file to `path`. Must be called after seal(). Replaces an older file.
  void publish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
