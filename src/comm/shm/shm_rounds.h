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

// Defines which bytes a collective sends in which round. A rank's slot, its buffer in shared
// memory, has a fixed size; further rounds send the remaining bytes. No function waits for ranks.
namespace tessera::comm {

/// A function that sets `output[i]` to the reduction of `sources[0][i], sources[1][i], ...`. The
/// order of the sources is the same on every rank, so that all ranks get equal bits. There are at
/// least two sources. 16-bit floats accumulate in fp32. `output` can be one of the sources.
using ReduceFunction = void (*)(std::byte* output, std::span<const std::byte* const> sources,
                                std::size_t elements);

/// Returns the reduction for an element type and an operator. Throws Error, with the name of the
/// collective, if there is none.
ReduceFunction reduction(const GroupInfo& group, const char* collective, c10::ScalarType type,
                         ReduceOp op);

using Slots = std::span<const std::byte* const>;

std::int64_t bytes_of(const at::Tensor& tensor);
std::byte* data_of(const at::Tensor& tensor);
void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes);
/// Returns the number of rounds that send `bytes` bytes, `capacity` bytes in a round; at least 1.
std::int64_t rounds_for(std::int64_t bytes, std::int64_t capacity);

/// The bytes of a transfer that round `round` sends: `bytes` bytes from `offset` on. Each round
/// except the last sends `capacity` bytes.
struct Piece {
  Piece(std::int64_t total, std::int64_t capacity, std::int64_t round)
      : offset(std::min(round * capacity, total)), bytes(std::min(capacity, total - offset)) {}
  std::int64_t offset;
  std::int64_t bytes;
};

/// Splits `total` bytes into one part per rank. Each part has `part` bytes; the last parts can be
/// shorter or empty.
struct EqualParts {
  std::int64_t total;
  std::int64_t part;

  std::int64_t offset(int rank) const { return std::min(rank * part, total); }
  std::int64_t bytes(int rank) const { return std::min(part, total - offset(rank)); }
};
/// Parts begin at cache lines, so that no two ranks write to the same cache line.
EqualParts line_parts(std::int64_t total, int ranks);

/// A tensor's memory, divided into one part for each rank. `whole`: the address of the whole
/// tensor. `own`: the address of this rank's part, which can be inside `whole`.
struct SplitBuffer {
  EqualParts parts;
  std::byte* whole;
  std::byte* own;
};
using SplitBuffers = std::vector<SplitBuffer>;

/// The rounds of a reduce-scatter. A rank's slot (buffer) has `capacity_` bytes for each rank.
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
  /// Number of bytes for each rank in a slot (a rank's buffer): a multiple of the cache-line size.
  std::int64_t capacity_;
  /// The reduction. The output can be one of the inputs, because an all-reduce reduces in place.
  ReduceFunction reduce_;
  std::size_t item_bytes_;
  std::vector<const std::byte*> sources_;
};

struct GatherRounds {
  // A rank's slot (buffer) contains only the rank's part, so `capacity` is the size of a slot.
  int rank;
  SplitBuffers buffers;
  std::int64_t capacity;

  std::int64_t count() const;
  void produce(std::int64_t round, std::byte* slot) const;
  void consume(std::int64_t round, Slots slots) const;
};

/// The rounds of an all-to-all. A slot (a rank's buffer) contains the rank's counts, then one part
/// for each rank. All ranks check all counts, so that all ranks fail together.
class ExchangeRounds {
 public:
  ExchangeRounds(const GroupInfo& group, std::int64_t slot_bytes, const at::Tensor& output,
                 const at::Tensor& input, std::span<const std::int64_t> output_counts,
                 std::span<const std::int64_t> input_counts);

  std::int64_t count() const;
  void produce(std::int64_t round, std::byte* slot) const;
  /// Reads the slots (buffers) of all ranks. In round 0, throws Error on every rank if the counts
  /// of a sender and of a receiver differ.
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
  /// The size in bytes of the table at the beginning of a slot (buffer): the number of elements
  /// that the slot's rank sends to each rank, and the number that it expects from each rank.
  std::int64_t table_bytes_;
  std::int64_t capacity_;
};

}  // namespace tessera::comm
