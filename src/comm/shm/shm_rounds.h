#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "group_info.h"
#include "tessera/core/placement.h"

// Computes which bytes a collective sends in which round. In a round, a rank sends what fits in its
// slot (its buffer in shared memory).
namespace tessera::comm {

/// A function that sets `output[i]` to the reduction of `sources[0][i], sources[1][i], ...` (at
/// least two), in order. 16-bit floats accumulate in fp32. `output` can be one of the sources.
using ReduceFunction = void (*)(std::byte* output, std::span<const std::byte* const> sources,
                                std::size_t elements);

/// Returns the reduction for an element type and an operator. Throws Error, which names the
/// collective, if the operator does not support the type.
ReduceFunction reduction(const GroupInfo& group, const char* collective, c10::ScalarType type,
                         ReduceOp op);

using Slots = std::span<const std::byte* const>;

std::int64_t bytes_of(const at::Tensor& tensor);
std::byte* data_of(const at::Tensor& tensor);
void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes);
/// Returns how many rounds send `bytes` bytes if a round sends `capacity` bytes; at least 1.
std::int64_t rounds_for(std::int64_t bytes, std::int64_t capacity);

/// The part of `total` bytes that round `round` sends: `bytes` bytes, beginning at byte `offset`.
/// Each round except the last sends `capacity` bytes.
struct Piece {
  Piece(std::int64_t total, std::int64_t capacity, std::int64_t round)
      : offset(std::min(round * capacity, total)), bytes(std::min(capacity, total - offset)) {}
  std::int64_t offset;
  std::int64_t bytes;
};

/// Splits `total` bytes into one part per rank. Each part has `part` bytes, but the parts of the
/// last ranks can be shorter or empty.
struct EqualParts {
  std::int64_t total;
  std::int64_t part;

  std::int64_t offset(int rank) const { return std::min(rank * part, total); }
  std::int64_t bytes(int rank) const { return std::min(part, total - offset(rank)); }
};
/// Returns parts that begin at cache lines, so that no two ranks write to the same cache line.
EqualParts line_parts(std::int64_t total, int ranks);

/// The memory of a tensor with one part for each rank. `whole`: the tensor's address. `own`: the
/// address of this rank's part, which can be inside the tensor.
struct SplitBuffer {
  EqualParts parts;
  std::byte* whole;
  std::byte* own;
};
using SplitBuffers = std::vector<SplitBuffer>;

/// The rounds of a reduce-scatter. A slot (a rank's buffer) has `capacity_` bytes for each rank.
class ScatterRounds {
 public:
  ScatterRounds(const GroupInfo& group, std::int64_t slot_bytes, SplitBuffers buffers,
                ReduceFunction reduce, std::size_t item_bytes);

  std::int64_t count() const;
  void produce(std::int64_t round, std::byte* slot) const;
  void consume(std::int64_t round, Slots slots);

 private:
  int rank_;
  SplitBuffers buffers_;
  /// How many bytes of a slot (a rank's buffer) each rank gets: a multiple of a cache line.
  std::int64_t capacity_;
  /// The function that reduces. Its output can be one of its inputs (all-reduce in place).
  ReduceFunction reduce_;
  std::size_t item_bytes_;
  std::vector<const std::byte*> sources_;
};

struct GatherRounds {
  // `capacity`: the size of a slot (a rank's buffer), which contains only that rank's part.
  int rank;
  SplitBuffers buffers;
  std::int64_t capacity;

  std::int64_t count() const;
  void produce(std::int64_t round, std::byte* slot) const;
  void consume(std::int64_t round, Slots slots) const;
};

/// The rounds of an all-to-all. A slot (a rank's buffer) contains counts of elements and one part
/// for each rank. Every rank checks all counts, so all ranks throw together.
class ExchangeRounds {
 public:
  ExchangeRounds(const GroupInfo& group, std::int64_t slot_bytes, const at::Tensor& output,
                 const at::Tensor& input, std::span<const std::int64_t> output_counts,
                 std::span<const std::int64_t> input_counts);

  std::int64_t count() const;
  void produce(std::int64_t round, std::byte* slot) const;
  /// Reads the slots (buffers) of all ranks. Round 0 throws Error on every rank if a rank expects
  /// another number of elements than the sender sends.
  void consume(std::int64_t round, Slots slots) const;

 private:
  void check_counts(Slots slots) const;
  void copy_own() const;

  GroupInfo group_;
  std::int64_t item_bytes_;
  const std::byte* input_;
  std::byte* output_;
  std::vector<std::int64_t> input_counts_;
  std::vector<std::int64_t> output_counts_;
  /// The size in bytes of the table at the beginning of a slot (buffer). The table contains how
  /// many elements a rank sends to, and expects from, each rank.
  std::int64_t table_bytes_;
  std::int64_t capacity_;
};

}  // namespace tessera::comm
