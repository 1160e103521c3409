// A saved step on disk, and multi-threaded reading of the bytes that a rank needs.

#pragma once

#include "format.h"
#include "manifest.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// Throws Error unless the header of `file` has tensor `name` with the sizes and type that the
/// manifest gives.
void check_entry(const SafetensorsFile& file, const std::string& name, const ManifestTensor& tensor,
                 const ManifestChunk& chunk);

/// Limits of a read. Each thread has a read buffer of at most one piece.
struct ReadLimits {
  int threads = 4;
  std::int64_t piece_bytes = kMostPieceBytes;
};

/// Fills blocks of memory from files, one piece at a time, with several threads if there are enough
/// bytes.
class PieceReads {
 public:
  explicit PieceReads(const ReadLimits& limits = {}) : limits_(limits) {}

  /// Requests a read into `target`: the part of the tensor `name` that begins at `from`, converted
  /// to the type of `target`. The file must outlive run().
  void add(const SafetensorsFile& file, const std::string& name, std::span<const std::int64_t> from,
           const at::Tensor& target);
  /// Reads the requested pieces in order. Throws the error of the first piece that fails. The
  /// message names the tensor, except in errors of opening or reading a file.
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

/// Reads a saved step. The caller first requests blocks and then reads all requested blocks at
/// once, so that each file is opened only once.
class StoredStep {
 public:
  StoredStep(std::filesystem::path folder, Manifest manifest);

  const Manifest& manifest() const { return manifest_; }
  const std::filesystem::path& folder() const { return folder_; }
  /// Finds a tensor by its name or by a tied name; nullptr if the step has no such tensor.
  const ManifestTensor* find(const std::string& name) const;

  /// Requests a read into `block`: the part of the tensor `name` that begins at `offset`, converted
  /// to the type of `block`.
  void want(const std::string& name, std::span<const std::int64_t> offset, const at::Tensor& block);
  /// Checks the headers of the files that have requested tensors. Throws Error for a file that is
  /// missing, has another size, or differs from the manifest.
  void check() const;
  /// Fills the requested blocks and clears the requests. Throws the errors of check(), and Error
  /// for bytes that do not match their checksum.
  void read(const ReadLimits& limits = {});
  /// Reads the block at `offset` of a tensor of the saved step, converted to `type`.
  at::Tensor values(const std::string& name, std::span<const std::int64_t> offset,
                    std::span<const std::int64_t> sizes, c10::ScalarType type);

 private:
  /// A requested part of a stored block (chunk), and the memory to fill.
  struct Wanted {
    std::string name;
    const ManifestTensor* tensor;
    const ManifestChunk* chunk;
    std::vector<std::int64_t> from;  ///< where the requested part begins in the stored block
    at::Tensor target;
  };

  /// Maps each name of a tied parameter to the name under which the files store the parameter.
  const std::string& stored_name(const std::string& name) const;
  SafetensorsFile open(std::size_t file, const std::vector<Wanted>& wanted) const;

  std::filesystem::path folder_;
  Manifest manifest_;
  std::map<std::string, std::string> stored_names_;
  std::map<std::size_t, std::vector<Wanted>> wanted_;
};

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
