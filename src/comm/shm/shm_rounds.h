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

// The layout of the bytes of a collective in slots and rounds. A slot has a fixed size; bytes that
// do not fit are sent in further rounds. Each rank computes the layout alone: the functions neither
// wait nor synchronise.
namespace tessera::comm {

/// A function that sets `output[i]` to the reduction of `sources[0][i], sources[1][i], ...`. The
/// order of the terms is equal on every rank, so that all ranks that compute the reduction get
/// equal bits. There are at least two sources. 16-bit floats accumulate in fp32. `output` may be
/// one of the sources.
using ReduceFunction = void (*)(std::byte* output, std::span<const std::byte* const> sources,
                                std::size_t elements);

/// The reduction for a type and an operator; nullptr if the operator is not defined for the type.
ReduceFunction find_reduce(c10::ScalarType type, ReduceOp op);

/// The slots of all ranks in one round, in rank order.
using Slots = std::span<const std::byte* const>;

std::int64_t bytes_of(const at::Tensor& tensor);
std::byte* data_of(const at::Tensor& tensor);
/// Copies `bytes` bytes. Does nothing if `to` and `from` are equal.
void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes);
/// The number of rounds for `bytes` if a round has room for `capacity` bytes; at least one.
std::int64_t rounds_for(std::int64_t bytes, std::int64_t capacity);

/// The part of `total` bytes that is sent in round `round` if a round has room for `capacity`
/// bytes.
struct Piece {
  Piece(std::int64_t total, std::int64_t capacity, std::int64_t round)
      : offset(std::min(round * capacity, total)), bytes(std::min(capacity, total - offset)) {}
  std::int64_t offset;
  std::int64_t bytes;
};

/// Bytes divided into one part for each rank. Parts are equal, except that the last parts may be
/// shorter or empty.
struct EqualParts {
  std::int64_t total;
  std::int64_t part;

  std::int64_t offset(int rank) const { return std::min(rank * part, total); }
  std::int64_t bytes(int rank) const { return std::min(part, total - offset(rank)); }
};
/// Divides `total` bytes into parts that begin at cache lines, so that no two ranks write to one
/// cache line.
EqualParts line_parts(std::int64_t total, int ranks);

/// The memory of a tensor, divided into one part for each rank. `whole`: the first byte of the
/// tensor. `own`: the address of the part of this rank, which may be inside `whole`.
struct SplitBuffer {
  EqualParts parts;
  std::byte* whole;
  std::byte* own;
};
/// The tensors of one collective. The bytes of a rank are its parts of all tensors, one after
/// another.
using SplitBuffers = std::vector<SplitBuffer>;

/// The rounds of a reduce-scatter. Each slot has room for `capacity_` bytes for each rank.
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
  /// The bytes for each rank in a slot: a multiple of the size of a cache line.
  std::int64_t capacity_;
  /// The reduction, which may write to a part of its own input, because an all-reduce reduces in
  /// place.
  ReduceFunction reduce_;
  std::size_t item_bytes_;
  /// The sources of one reduction. The vector is a member to save an allocation for each buffer.
  std::vector<const std::byte*> sources_;
};

/// The rounds of an all-gather.
struct GatherRounds {
  // The slot of a rank contains only the part of that rank, so `capacity` is the size of a slot.
  int rank;
  SplitBuffers buffers;
  std::int64_t capacity;

  std::int64_t count() const;
  void produce(std::int64_t round, std::byte* slot) const;
  void consume(std::int64_t round, Slots slots) const;
};

/// The rounds of an all-to-all. A slot contains the counts of its rank, then one part for each
/// rank. All ranks check the counts of all ranks, so that they fail together.
class ExchangeRounds {
 public:
  ExchangeRounds(const GroupInfo& group, std::int64_t slot_bytes, const at::Tensor& output,
                 const at::Tensor& input, std::span<const std::int64_t> output_counts,
                 std::span<const std::int64_t> input_counts);

  std::int64_t count() const;
  void produce(std::int64_t round, std::byte* slot) const;
  /// Reads the slots of a round. Throws Error in round 0, on every rank, if the counts of a sender
  /// and a receiver differ.
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
  /// The size of the counts at the beginning of a slot: the bytes for each rank, then the bytes
  /// expected from each rank.
  std::int64_t table_bytes_;
  std::int64_t capacity_;
};

}  // namespace tessera::comm
