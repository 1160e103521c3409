// Sums, averages, products, maxima and minima over the slots of the ranks, for the types that
// training uses. The functions are plain loops over blocks that fit in the cache; compilers
// vectorise these loops. find_reduce() instantiates the template for each pair of a type and an
// operator that the type supports.
#include "shm/shm_reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>

namespace tessera::comm {
namespace {

/// The type in which the terms of a reduction are added.
template <class T>
struct Accumulator {
  using type = T;
};
/// 16-bit floats accumulate in fp32, to round once at the end instead of once for each rank.
template <>
struct Accumulator<c10::Half> {
  using type = float;
};
template <>
struct Accumulator<c10::BFloat16> {
  using type = float;
};
// Integer sums are computed as unsigned numbers, which wrap around, because signed overflow is
// undefined behaviour.
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

/// The type in which terms are combined. Maxima and minima of integers use the type of the
/// elements, because the accumulator may differ in signedness.
template <class T, ReduceOp kOp>
using Sum =
    std::conditional_t<kOrdered<T, kOp> && std::is_integral_v<T>, T, typename Accumulator<T>::type>;

/// Combines two terms. The result of maxima and minima is NaN if one of the terms is NaN, as in
/// at::amax.
template <ReduceOp kOp, class A>
A combine(A sum, A next) {
  if constexpr (kOp == ReduceOp::kSum || kOp == ReduceOp::kAvg) {
    return sum + next;
  } else if constexpr (kOp == ReduceOp::kProduct) {
    return sum * next;
  } else if constexpr (kOp == ReduceOp::kMax) {
    // Only a NaN differs from itself. A NaN in `next` makes the comparison false, so the result is
    // `next`.
    return sum >= next || sum != sum ? sum : next;
  } else {
    return sum <= next || sum != sum ? sum : next;
  }
}

template <class T, ReduceOp kOp>
void reduce(std::byte* output, std::span<const std::byte* const> sources, std::size_t elements) {
  using A = Sum<T, kOp>;
  constexpr std::size_t kBlock = 1024;  // fits in the first-level cache
  // A block is reduced over all sources before the output is written, because the output may be one
  // of the sources.
  std::array<A, kBlock> sums;
  // The number of terms is converted through float, because the accumulator may be complex.
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

/// The reduction of complex numbers, which have no maximum or minimum.
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

/// The reduction of booleans. For the values 0 and 1, "any" is the maximum, and "all" is the
/// minimum and the product.
ReduceFunction of_bool(ReduceOp op) {
  return op == ReduceOp::kMax       ? reduce<std::uint8_t, ReduceOp::kMax>
         : op == ReduceOp::kMin     ? reduce<std::uint8_t, ReduceOp::kMin>
         : op == ReduceOp::kProduct ? reduce<std::uint8_t, ReduceOp::kProduct>
                                    : nullptr;
}

}  // namespace

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

}  // namespace tessera::comm
