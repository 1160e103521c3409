#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "group_info.h"
#include "shm_reduce.h"

namespace tessera::comm {

/// The ranks' slots of one round, in rank order.
using Slots = std::span<const std::byte* const>;

std::int64_t bytes_of(const at::Tensor& tensor);
std::byte* data_of(const at::Tensor& tensor);
/// The ranges may be the same.
void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes);
/// Rounds for `bytes` when `capacity` go in one; at least one.
std::int64_t rounds_for(std::int64_t bytes, std::int64_t capacity);

/// The part of `total` bytes that falls into `round` when `capacity` bytes go in one.
struct Piece {
  Piece(std::int64_t total, std::int64_t capacity, std::int64_t round)
      : offset(std::min(round * capacity, total)), bytes(std::min(capacity, total - offset)) {}
  std::int64_t offset;
  std::int64_t bytes;
};

/// Bytes cut into one part a rank: equal ones, the last ones shorter or empty.
struct Parts {
  std::int64_t total;
  std::int64_t part;

  std::int64_t offset(int rank) const { return std::min(rank * part, total); }
  std::int64_t bytes(int rank) const { return std::min(part, total - offset(rank)); }
};
/// Parts whose borders are cache lines.
Parts line_parts(std::int64_t total, int ranks);

/// A tensor that is cut into a part a rank: `whole` is all of it, `own` this rank's part, which may
/// lie in `whole`.
struct Strand {
  Parts parts;
  std::byte* whole;
  std::byte* own;
};
/// What goes through one collective, part after part: each rank's bytes are its parts of all
/// strands, one after another.
using Strands = std::vector<Strand>;

/// The rounds of a reduce-scatter of strands: each slot is divided into room for each rank.
class ScatterRounds {
 public:
  ScatterRounds(const GroupInfo& group, std::int64_t slot_bytes, Strands strands,
                ReduceFunction reduce, std::size_t item_bytes);

  std::int64_t count() const;
  void produce(std::int64_t round, std::byte* slot) const;
  void consume(std::int64_t round, Slots slots);

 private:
  int rank_;
  Strands strands_;
  std::int64_t capacity_;
  ReduceFunction reduce_;
  std::size_t item_bytes_;
  std::vector<const std::byte*> sources_;
};

/// The rounds of an all-gather of strands.
struct GatherRounds {
  int rank;
  Strands strands;
  std::int64_t capacity;

  std::int64_t count() const;
  void produce(std::int64_t round, std::byte* slot) const;
  void consume(std::int64_t round, Slots slots) const;
};

/// The rounds of an all-to-all. A slot begins with its rank's counts, so that all ranks check all
/// of them and fail together; then comes one part for each rank.
class ExchangeRounds {
 public:
  ExchangeRounds(const GroupInfo& group, std::int64_t slot_bytes, const at::Tensor& output,
                 const at::Tensor& input, std::span<const std::int64_t> output_counts,
                 std::span<const std::int64_t> input_counts);

  std::int64_t count() const;
  void produce(std::int64_t round, std::byte* slot) const;
  /// Throws Error in round 0, on every rank, if a sender's and a receiver's counts differ.
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
  std::int64_t table_bytes_;
  std::int64_t capacity_;
};

}  // namespace tessera::comm
