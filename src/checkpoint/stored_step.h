// A step on disk, and how a rank reads the bytes that it needs, with several threads.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "format.h"
#include "manifest.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// Runs each task once, started in their order, several at a time: on this thread and up to
/// `threads` - 1 others. These get this thread's thread-local state (gradient mode, scopes), and
/// the progress that they note counts as this thread's. Returns when all have ended. Throws the
/// error of the first task that failed; tasks that had not begun are then skipped.
void run_on_threads(int threads, const std::vector<std::function<void()>>& tasks);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END

namespace tessera::checkpoint {

/// Buffers for reading hold at most a piece for each thread.
struct ReadLimits {
  int threads = 4;
  std::int64_t piece_bytes = kMostPieceBytes;
};

/// Fills blocks of memory from files, a piece at a time, by several threads where there is much.
class PieceReads {
 public:
  explicit PieceReads(const ReadLimits& limits = {}) : limits_(limits) {}

  /// Notes that `target` is to be filled with the values of a tensor of `file` at `from`, converted
  /// to its type. The file must outlive run().
  void add(const SafetensorsFile& file, const std::string& name, std::span<const std::int64_t> from,
           const at::Tensor& target);
  /// Reads the added pieces in order. Throws the error of the first read that fails; an Error that
  /// is not about reading itself names the tensor.
  void run();

 private:
  struct Piece {
    std::function<void()> read;
    std::int64_t bytes;
  };
  ReadLimits limits_;
  std::vector<Piece> pieces_;
  std::int64_t bytes_ = 0;
};

}  // namespace tessera::checkpoint

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// A step on the disk, for reading. Requests are collected first: then one file after another is
/// opened, however many ranks have written the step.
class StoredStep {
 public:
  StoredStep(std::filesystem::path folder, Manifest manifest);

  const Manifest& manifest() const { return manifest_; }
  const std::filesystem::path& folder() const { return folder_; }
  /// The tensor of this name, also by a tied tensor's other name; nullptr if there is none.
  const ManifestTensor* find(const std::string& name) const;

  /// Notes that `block` is to be filled with the values of a tensor at `offset`, converted to its
  /// type.
  void want(const std::string& name, std::span<const std::int64_t> offset, const at::Tensor& block);
  /// Checks the headers of the files with requested tensors. Throws Error for a file that is
  /// missing, has another size, or differs from the manifest.
  void check() const;
  /// Fills the requested blocks, by several threads where there is much; then no request is left.
  /// Throws Error as check() does, and for bytes that differ from those written.
  void read(const ReadLimits& limits = {});

 private:
  /// A part of a chunk, and where it goes.
  struct Wanted {
    std::string name;  ///< that the file has
    const ManifestTensor* tensor;
    const ManifestChunk* chunk;
    std::vector<std::int64_t> from;  ///< within the chunk
    at::Tensor target;
  };

  /// The name under which the files have it.
  const std::string& stored_name(const std::string& name) const;
  /// Opens a file and compares what is wanted of it with its header.
  SafetensorsFile open(std::size_t file, const std::vector<Wanted>& wanted) const;

  std::filesystem::path folder_;
  Manifest manifest_;
  std::map<std::string, std::string> stored_names_;
  std::map<std::size_t, std::vector<Wanted>> wanted_;  ///< by file
};

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
