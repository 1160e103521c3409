// The parts of the file format: blocks of tensors, checksums of files, and what a safetensors
// header may contain. Readers, writers and manifests share them.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/detail/rounding.h"
#include "tessera/core/input_file.h"
#include "tessera/core/layout_math.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// How many elements a block of these sizes has.
std::int64_t product(std::span<const std::int64_t> sizes);

/// Throws Error unless the block [offset, offset + block) lies inside a tensor of `sizes`.
void check_block(std::span<const std::int64_t> sizes, std::span<const std::int64_t> offset,
                 std::span<const std::int64_t> block);

/// Calls `visit(element, count)` for each contiguous run of the block [offset, offset + block) of a
/// row-major tensor of `sizes`, in order: the longest runs there are. Not for an empty block.
void for_each_run(std::span<const std::int64_t> sizes, std::span<const std::int64_t> offset,
                  std::span<const std::int64_t> block,
                  const std::function<void(std::int64_t element, std::int64_t count)>& visit);

/// Large blocks are read and written in pieces of at most this size, so that intermediate copies
/// (on the host, of another type) are small.
inline constexpr std::int64_t kMostPieceBytes = std::int64_t{32} << 20;

/// Calls `visit(offset, sizes)` for pieces of a block of `sizes`, in row-major order, each of at
/// most `most_elements`: ranges of rows or, where a row is larger, of what is within it. A scalar
/// is one piece, an empty block none.
void for_each_piece(std::span<const std::int64_t> sizes, std::int64_t most_elements,
                    const std::function<void(std::span<const std::int64_t> offset,
                                             std::span<const std::int64_t> sizes)>& visit);

/// `from` + `by`, in each dimension.
std::vector<std::int64_t> moved(std::span<const std::int64_t> from,
                                std::span<const std::int64_t> by);

/// The blocks of a tensor that this rank has: one block for a plain tensor; none if the rank is not
/// on the mesh.
std::vector<Box> owned_blocks(const at::Tensor& tensor);
/// The block [offset, offset + sizes) of a tensor in memory: a view.
at::Tensor block_at(const at::Tensor& tensor, std::span<const std::int64_t> offset,
                    std::span<const std::int64_t> sizes);
/// The part of a local tensor that a box describes: a view.
at::Tensor local_block(const at::Tensor& local, const Box& box);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END

namespace tessera::checkpoint {

inline constexpr std::uint64_t kGranuleBytes = std::uint64_t{1} << 20;

/// How many granules a file of `bytes` has; the last may be shorter.
constexpr std::uint64_t granules_of(std::uint64_t bytes) {
  return tessera::detail::ceil_div(bytes, kGranuleBytes);
}

/// Fills `out`, of at most a granule, with the bytes of a file at `offset`, and returns their
/// CRC-32C. Each part is summed while it is in the processor's cache, and noted as progress of this
/// thread.
std::uint32_t read_and_sum(const files::InputFile& file, std::uint64_t offset,
                           std::span<std::byte> out);

TESSERA_API_FOR_TEST_BEGIN
/// The CRC-32C of each granule of a file that is written from its start to its end.
class GranuleSums {
 public:
  /// Throws Error where `bytes` do not follow those before.
  void add(std::uint64_t offset, std::span<const std::byte> bytes);

  std::uint64_t bytes() const { return bytes_; }
  const std::vector<std::uint32_t>& sums() const { return sums_; }

 private:
  std::uint64_t bytes_ = 0;
  std::vector<std::uint32_t> sums_;
};
TESSERA_API_FOR_TEST_END

/// A file whose bytes are compared with checksums while they are read. Thread safe.
class CheckedFile {
 public:
  /// `sums`: of each granule; none: nothing is compared. Throws Error if the file's size needs
  /// another number of them.
  CheckedFile(files::InputFile file, std::vector<std::uint32_t> sums);

  const std::filesystem::path& path() const { return file_.path(); }
  std::uint64_t size() const { return file_.size(); }
  /// Reads whole granules, and notes progress of this thread. Throws Error, naming the file and the
  /// place, for bytes that differ from those written.
  void read_at(std::uint64_t offset, std::span<std::byte> out) const;

 private:
  /// A granule that was read for a part of it.
  struct CachedGranule {
    std::vector<std::byte> bytes;
    std::uint64_t index = UINT64_MAX;
  };

  void read_granule(std::uint64_t index, std::span<std::byte> out) const;
  void read_part(std::uint64_t index, std::uint64_t within, std::span<std::byte> out) const;
  CachedGranule& cache_of_this_thread() const;
  std::uint64_t bytes_of_granule(std::uint64_t index) const;

  files::InputFile file_;
  std::vector<std::uint32_t> sums_;
  // The last granule of each thread: a thread reads short runs in rising order. The mutex guards
  // only the map, so that threads do not wait for each other's reads.
  mutable std::mutex mutex_;
  mutable std::map<std::thread::id, CachedGranule> cache_;
};

/// One of the types of the safetensors format.
struct SafetensorsDtype {
  std::string_view name;
  int bits;
  c10::ScalarType scalar_type;  ///< Undefined where libtorch has no such type
  int order;                    ///< the reference writes tensors by falling order, then by name
};

/// nullptr for a name that the format lacks.
const SafetensorsDtype* find_dtype(std::string_view name);
/// nullptr for a type that the format lacks.
const SafetensorsDtype* find_dtype(c10::ScalarType type);

/// Bytes of a tensor of these sizes. Throws Error if their product, zeros counted as ones, or the
/// number of bits does not fit into 64 bits, or if it is not a whole number of bytes.
std::uint64_t tensor_bytes(std::span<const std::int64_t> sizes, const SafetensorsDtype& dtype);

/// Whether UTF-8 has a control character, or one that turns the direction of text: in a message it
/// could break the line, or show another name.
bool has_control_character(std::string_view text);

/// Throws Error for a tensor name that no program should trust: empty, longer than 4 KiB, with a
/// control character, one that turns the direction of text, a path separator or "..", or that of a
/// header's own entry.
void check_tensor_name(std::string_view name);

/// Throws Error, naming `what` ("its shape"), for all but a natural number of at most 2^63 - 1.
std::int64_t natural_number(const nlohmann::json& value, const char* what);

/// A list of such, one for each dimension of a tensor. Throws Error also for more of them than
/// libtorch's operators take.
std::vector<std::int64_t> natural_numbers(const nlohmann::json& value, const char* what);

/// The reference implementation's limit.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

struct SafetensorsHeader {
  std::map<std::string, TensorEntry> tensors;  ///< offsets from the start of the data
  std::map<std::string, std::string> metadata;
};

/// Parses and checks the header of a file whose data are `data_bytes` long. Throws Error, naming
/// the tensor, for whatever the format forbids.
SafetensorsHeader parse_header(std::string_view text, std::uint64_t data_bytes);

/// The header of a file with these tensors, padded with spaces to a multiple of 8, and where each
/// tensor's data go (from the start of the data).
struct HeaderPlan {
  std::string json;
  std::map<std::string, TensorEntry> tensors;
  std::uint64_t data_bytes = 0;
};
HeaderPlan plan_header(std::vector<SafetensorsWriter::Item> items,
                       const std::map<std::string, std::string>& metadata);

}  // namespace tessera::checkpoint
