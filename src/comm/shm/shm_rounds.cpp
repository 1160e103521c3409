#include "shm/shm_rounds.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <array>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <utility>

#include "tessera/core/detail/rounding.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

/// The size of a cache line in bytes, a multiple of the size of every element type. Splitting bytes
/// at cache lines therefore never splits an element.
constexpr std::int64_t kLine = 64;

std::size_t index(int rank) {
  return static_cast<std::size_t>(rank);
}

std::int64_t round_down_to_line(std::int64_t bytes) {
  return bytes / kLine * kLine;
}

std::int64_t round_up_to_line(std::int64_t bytes) {
  return tessera::detail::round_up(bytes, kLine);
}

std::int64_t sum_before(const std::vector<std::int64_t>& counts, int rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
}

/// A contiguous range of a tensor's bytes, and its position in a slot (buffer in shared memory).
struct Span {
  std::int64_t in_part;
  std::int64_t in_slot;
  std::int64_t bytes;
};

std::int64_t bytes_of_rank(const SplitBuffers& buffers, int rank) {
  std::int64_t bytes = 0;
  for (const SplitBuffer& buffer : buffers) {
    bytes += buffer.parts.bytes(rank);
  }
  return bytes;
}

/// Calls `visit` for each contiguous range of bytes that round `round` sends to `rank`. A round
/// sends at most `capacity` bytes to each rank.
template <class Visit>
void for_each_span(const SplitBuffers& buffers, int rank, std::int64_t capacity, std::int64_t round,
                   Visit&& visit) {
  const std::int64_t begin = round * capacity;
  std::int64_t start = 0;
  // The bytes for a rank are the rank's parts of all tensors, one after another.
  for (const SplitBuffer& buffer : buffers) {
    const std::int64_t end = start + buffer.parts.bytes(rank);
    const std::int64_t first = std::max(begin, start);
    const std::int64_t last = std::min(begin + capacity, end);
    if (first < last) {
      visit(buffer, Span{first - start, first - begin, last - first});
    }
    start = end;
  }
}

const std::int64_t* table_of(const std::byte* slot) {
  return reinterpret_cast<const std::int64_t*>(slot);
}

}  // namespace

std::int64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.nbytes());
}

std::byte* data_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) {
  if (bytes > 0 && to != from) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

std::int64_t rounds_for(std::int64_t bytes, std::int64_t capacity) {
  return std::max<std::int64_t>(1, tessera::detail::ceil_div(bytes, capacity));
}

EqualParts line_parts(std::int64_t total, int ranks) {
  return {total, round_up_to_line(tessera::detail::ceil_div(total, ranks))};
}

ScatterRounds::ScatterRounds(const GroupInfo& group, std::int64_t slot_bytes, SplitBuffers buffers,
                             ReduceFunction reduce, std::size_t item_bytes)
    : rank_(group.rank),
      buffers_(std::move(buffers)),
      capacity_(round_down_to_line(slot_bytes / group.size())),
      reduce_(reduce),
      item_bytes_(item_bytes),
      sources_(index(group.size())) {}

/// Rank 0's part, which is the longest, determines the number of rounds.
std::int64_t ScatterRounds::count() const {
  return rounds_for(bytes_of_rank(buffers_, 0), capacity_);
}

/// Writes the bytes for each other rank into `slot`, this rank's buffer in shared memory.
void ScatterRounds::produce(std::int64_t round, std::byte* slot) const {
  for (int to = 0; to < static_cast<int>(sources_.size()); ++to) {
    if (to == rank_) {
      continue;
    }
    std::byte* room = slot + to * capacity_;
    for_each_span(buffers_, to, capacity_, round, [&](const SplitBuffer& buffer, const Span& span) {
      copy_bytes(room + span.in_slot, buffer.whole + buffer.parts.offset(to) + span.in_part,
                 span.bytes);
    });
  }
}

void ScatterRounds::consume(std::int64_t round, Slots slots) {
  for_each_span(buffers_, rank_, capacity_, round,
                [&](const SplitBuffer& buffer, const Span& span) {
                  for (std::size_t from = 0; from < slots.size(); ++from) {
                    sources_[from] = slots[from] + rank_ * capacity_ + span.in_slot;
                  }
                  // This rank's own data are put at sources_[rank_], so that all ranks reduce in
                  // the order of the ranks.
                  sources_[index(rank_)] = buffer.whole + buffer.parts.offset(rank_) + span.in_part;
                  reduce_(buffer.own + span.in_part, sources_,
                          static_cast<std::size_t>(span.bytes) / item_bytes_);
                });
}

std::int64_t GatherRounds::count() const {
  return rounds_for(bytes_of_rank(buffers, 0), capacity);
}

void GatherRounds::produce(std::int64_t round, std::byte* slot) const {
  for_each_span(buffers, rank, capacity, round, [&](const SplitBuffer& buffer, const Span& span) {
    copy_bytes(slot + span.in_slot, buffer.own + span.in_part, span.bytes);
  });
}

/// Copies the parts of all ranks to the output. Skips this rank's part if it is in the output
/// already (copy_bytes() checks that).
void GatherRounds::consume(std::int64_t round, Slots slots) const {
  for (int from = 0; from < static_cast<int>(slots.size()); ++from) {
    for_each_span(buffers, from, capacity, round, [&](const SplitBuffer& buffer, const Span& span) {
      copy_bytes(buffer.whole + buffer.parts.offset(from) + span.in_part,
                 from == rank ? buffer.own + span.in_part : slots[index(from)] + span.in_slot,
                 span.bytes);
    });
  }
}

ExchangeRounds::ExchangeRounds(const GroupInfo& group, std::int64_t slot_bytes,
                               const at::Tensor& output, const at::Tensor& input,
                               std::span<const std::int64_t> output_counts,
                               std::span<const std::int64_t> input_counts)
    : group_(group),
      item_bytes_(static_cast<std::int64_t>(input.element_size())),
      input_(data_of(input)),
      output_(data_of(output)),
      input_counts_(input_counts.begin(), input_counts.end()),
      output_counts_(output_counts.begin(), output_counts.end()),
      table_bytes_(round_up_to_line(2 * group.size() * std::int64_t{sizeof(std::int64_t)})),
      capacity_(round_down_to_line((slot_bytes - table_bytes_) / group.size())) {}

// The number of rounds that this rank needs; ranks with larger inputs can need more rounds.
std::int64_t ExchangeRounds::count() const {
  return rounds_for(*std::ranges::max_element(input_counts_) * item_bytes_, capacity_);
}

/// Fills `slot`, this rank's buffer in shared memory. The input's parts for the ranks have no gaps.
/// In the slot, part r begins at table_bytes_ + r * capacity_.
void ExchangeRounds::produce(std::int64_t round, std::byte* slot) const {
  if (round == 0) {
    auto* table = reinterpret_cast<std::int64_t*>(slot);
    // A slot begins with a table: how many elements this rank sends to, and expects from, each
    // rank. Every rank can then check the counts of all pairs.
    std::ranges::copy(output_counts_, std::ranges::copy(input_counts_, table).out);
  }
  const std::byte* part = input_;
  for (int to = 0; to < group_.size(); ++to) {
    const std::int64_t total = input_counts_[index(to)] * item_bytes_;
    if (to != group_.rank) {
      const Piece piece(total, capacity_, round);
      copy_bytes(slot + table_bytes_ + to * capacity_, part + piece.offset, piece.bytes);
    }
    part += total;
  }
}

/// Reads the slots (buffers in shared memory) of all ranks. Compares the ranks' counts first, so
/// that nothing is written to the output if counts differ.
void ExchangeRounds::consume(std::int64_t round, Slots slots) const {
  if (round == 0) {
    check_counts(slots);
    copy_own();
  }
  std::byte* part = output_;
  for (int from = 0; from < group_.size(); ++from) {
    const std::int64_t total = output_counts_[index(from)] * item_bytes_;
    if (from != group_.rank) {
      const Piece piece(total, capacity_, round);
      const std::byte* sent = slots[index(from)] + table_bytes_ + group_.rank * capacity_;
      copy_bytes(part + piece.offset, sent, piece.bytes);
    }
    part += total;
  }
}

void ExchangeRounds::check_counts(Slots slots) const {
  const int size = group_.size();
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      const std::int64_t sent = table_of(slots[index(from)])[to];
      const std::int64_t expected = table_of(slots[index(to)])[size + from];
      TESSERA_CHECK(sent == expected, describe(group_, "all_to_all"), ": rank ",
                    group_.ranks[index(from)], " sends ", sent, " elements to rank ",
                    group_.ranks[index(to)], ", which expects ", expected,
                    "; the two ranks must pass equal counts");
    }
  }
}

/// Copies the part that this rank sends to itself directly from the input to the output.
void ExchangeRounds::copy_own() const {
  const std::int64_t from = sum_before(input_counts_, group_.rank) * item_bytes_;
  const std::int64_t to = sum_before(output_counts_, group_.rank) * item_bytes_;
  copy_bytes(output_ + to, input_ + from, input_counts_[index(group_.rank)] * item_bytes_);
}

namespace {

// Elementwise reductions over the ranks' buffers: plain loops over blocks that fit in the cache,
// for vectorisation by the compiler. find_reduce() instantiates a template for each type and
// operator.

/// The type in which a reduction of elements of type T is computed.
template <class T>
struct Accumulator {
  using type = T;
};
/// 16-bit floats accumulate in fp32, so that a result is rounded once and not once for each rank.
template <>
struct Accumulator<c10::Half> {
  using type = float;
};
template <>
struct Accumulator<c10::BFloat16> {
  using type = float;
};
// Integers are reduced in unsigned types, because signed overflow is undefined behaviour. uint16_t
// becomes uint32_t, because C++ multiplies two uint16_t as signed integers.
template <>
struct Accumulator<std::uint16_t> {
  using type = std::uint32_t;
};
template <>
struct Accumulator<std::int32_t> {
  using type = std::uint32_t;
};
template <>
struct Accumulator<std::int64_t> {
  using type = std::uint64_t;
};

template <class T, ReduceOp kOp>
constexpr bool kOrdered = kOp == ReduceOp::kMax || kOp == ReduceOp::kMin;

/// The type in which values are combined: for maxima and minima of integers the element type
/// itself, because an unsigned Accumulator would compare negative numbers wrongly.
template <class T, ReduceOp kOp>
using Sum =
    std::conditional_t<kOrdered<T, kOp> && std::is_integral_v<T>, T, typename Accumulator<T>::type>;

/// Combines two values. A maximum or minimum is NaN if one of the values is NaN, as in at::amax.
template <ReduceOp kOp, class A>
A combine(A sum, A next) {
  if constexpr (kOp == ReduceOp::kSum || kOp == ReduceOp::kAvg) {
    return sum + next;
  } else if constexpr (kOp == ReduceOp::kProduct) {
    return sum * next;
  } else if constexpr (kOp == ReduceOp::kMax) {
    // Comparisons with NaN are false, so a NaN in `next` is returned. `sum != sum` holds only for
    // NaN, so a NaN in `sum` is returned too.
    return sum >= next || sum != sum ? sum : next;
  } else {
    return sum <= next || sum != sum ? sum : next;
  }
}

template <class T, ReduceOp kOp>
void reduce(std::byte* output, std::span<const std::byte* const> sources, std::size_t elements) {
  using A = Sum<T, kOp>;
  constexpr std::size_t kBlock = 1024;  // 1024 sums fit in the L1 cache
  // Each block is reduced over all sources before `output` is written, because `output` can be one
  // of the sources.
  std::array<A, kBlock> sums;
  // The count is converted to float first: a complex type A has no conversion from an integer.
  const auto terms = static_cast<A>(static_cast<float>(sources.size()));
  for (std::size_t start = 0; start < elements; start += kBlock) {
    const std::size_t count = std::min(kBlock, elements - start);
    const auto values_of = [&](std::size_t source) {
      return reinterpret_cast<const T*>(sources[source]) + start;
    };
    const T* first = values_of(0);
    const T* second = values_of(1);
    for (std::size_t i = 0; i < count; ++i) {
      sums[i] = combine<kOp>(static_cast<A>(first[i]), static_cast<A>(second[i]));
    }
    for (std::size_t source = 2; source < sources.size(); ++source) {
      const T* values = values_of(source);
      for (std::size_t i = 0; i < count; ++i) {
        sums[i] = combine<kOp>(sums[i], static_cast<A>(values[i]));
      }
    }
    T* result = reinterpret_cast<T*>(output) + start;
    for (std::size_t i = 0; i < count; ++i) {
      result[i] = static_cast<T>(kOp == ReduceOp::kAvg ? sums[i] / terms : sums[i]);
    }
  }
}

/// Returns the reduction for complex numbers, which have no maximum or minimum.
template <class T>
ReduceFunction of_complex(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce<T, ReduceOp::kSum>;
    case ReduceOp::kAvg:
      return reduce<T, ReduceOp::kAvg>;
    case ReduceOp::kProduct:
      return reduce<T, ReduceOp::kProduct>;
    default:
      return nullptr;
  }
}

template <class T>
ReduceFunction of_real(ReduceOp op) {
  return op == ReduceOp::kMax   ? reduce<T, ReduceOp::kMax>
         : op == ReduceOp::kMin ? reduce<T, ReduceOp::kMin>
                                : of_complex<T>(op);
}

ReduceFunction of_bool(ReduceOp op) {
  return op == ReduceOp::kMax       ? reduce<std::uint8_t, ReduceOp::kMax>
         : op == ReduceOp::kMin     ? reduce<std::uint8_t, ReduceOp::kMin>
         : op == ReduceOp::kProduct ? reduce<std::uint8_t, ReduceOp::kProduct>
                                    : nullptr;
}

ReduceFunction find_reduce(c10::ScalarType type, ReduceOp op) {
  switch (type) {
    case c10::ScalarType::Float:
      return of_real<float>(op);
    case c10::ScalarType::Double:
      return of_real<double>(op);
    case c10::ScalarType::Half:
      return of_real<c10::Half>(op);
    case c10::ScalarType::BFloat16:
      return of_real<c10::BFloat16>(op);
    case c10::ScalarType::Char:
      return of_real<std::int8_t>(op);
    case c10::ScalarType::Byte:
      return of_real<std::uint8_t>(op);
    case c10::ScalarType::Short:
      return of_real<std::int16_t>(op);
    case c10::ScalarType::Int:
      return of_real<std::int32_t>(op);
    case c10::ScalarType::Long:
      return of_real<std::int64_t>(op);
    case c10::ScalarType::UInt16:
      return of_real<std::uint16_t>(op);
    case c10::ScalarType::UInt32:
      return of_real<std::uint32_t>(op);
    case c10::ScalarType::UInt64:
      return of_real<std::uint64_t>(op);
    case c10::ScalarType::Bool:
      return of_bool(op);
    case c10::ScalarType::ComplexFloat:
      return of_complex<c10::complex<float>>(op);
    case c10::ScalarType::ComplexDouble:
      return of_complex<c10::complex<double>>(op);
    default:
      return nullptr;
  }
}

}  // namespace

ReduceFunction reduction(const GroupInfo& group, const char* collective, c10::ScalarType type,
                         ReduceOp op) {
  const ReduceFunction reduce = find_reduce(type, op);
  TESSERA_CHECK(reduce != nullptr, describe(group, collective), ": ", to_string(op), " of ", type,
                " is not implemented; convert to another type, such as float");
  return reduce;
}

}  // namespace tessera::comm
