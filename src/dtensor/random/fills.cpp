#include "random/fills.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <c10/util/MathConstants.h>

#include <cmath>
#include <limits>
#include <utility>

#include "rank/rank.h"
#include "tessera/core/error.h"
#include "tessera/kernels/detail/distribution.h"

namespace tessera::detail {
namespace {

using Arguments = std::span<const c10::IValue>;

/// Random numbers in fp64, the type in which the fills transform uniform numbers to other
/// distributions.
at::Tensor numbers(const RandomTarget& target, const kernels::Distribution& distribution,
                   RandomKey key) {
  auto values = at::empty(target.local.sizes(), target.local.options().dtype(at::kDouble));
  fill_random(values, target.place, distribution, key);
  return values;
}

at::Tensor uniform_numbers(const RandomTarget& target) {
  return numbers(target, kernels::Uniform{0, 1}, target.key);
}

/// The largest n such that the type represents every integer from 0 to n exactly.
std::uint64_t last_integer(c10::ScalarType type) {
  return AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, type, "last_integer", [] {
    using Limits = std::numeric_limits<scalar_t>;
    if constexpr (Limits::is_integer) {
      return static_cast<std::uint64_t>(Limits::max());
    } else {
      return std::uint64_t{1} << Limits::digits;
    }
  });
}

/// Whether `value`, or a rounded value near it, is in the range of the type.
bool holds(c10::ScalarType type, double value) {
  return AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, type, "holds", [&] {
    using Limits = std::numeric_limits<scalar_t>;
    if constexpr (Limits::is_integer) {
      const auto last = static_cast<double>(last_integer(type));
      return value <= last && value >= (Limits::is_signed ? -last - 1 : 0);
    } else {
      return std::abs(value) <= static_cast<double>(Limits::max());
    }
  });
}

/// Random integers of up to 64 bits, made from two random numbers of 53 bits.
at::Tensor bits_of(const RandomTarget& target, int bits) {
  constexpr int kLowBits = 32;
  const RandomKey more{target.key.seed, substream(target.key.stream, 0)};
  const auto high = uniform_numbers(target).mul_(std::exp2(bits - kLowBits)).floor_();
  const auto low = numbers(target, kernels::Uniform{0, std::exp2(kLowBits)}, more).floor_();
  return high.to(at::kLong).bitwise_left_shift_(kLowBits).add_(low.to(at::kLong));
}

/// Random integers in [0, range), as a remainder, like libtorch. A `range` of 0 means 2^64.
at::Tensor integers(const RandomTarget& target, std::uint64_t range) {
  constexpr std::uint64_t kHalf = std::uint64_t{1} << 63;
  if (range != 0 && range <= kHalf) {
    const auto bits = bits_of(target, 63);
    return range == kHalf ? bits : bits.remainder_(static_cast<std::int64_t>(range));
  }
  const auto bits = bits_of(target, 64);
  // Signed integers with the highest bit inverted compare like unsigned ones.
  const auto end = static_cast<std::int64_t>(range);
  const auto least = std::numeric_limits<std::int64_t>::min();
  return range == 0 ? bits : at::where((bits ^ least) >= (end ^ least), bits - end, bits);
}

void fill_integers_within(const RandomTarget& target, std::int64_t from, std::int64_t last) {
  const c10::ScalarType type = target.local.scalar_type();
  for (const std::int64_t bound : {from, last}) {
    TESSERA_CHECK(holds(type, static_cast<double>(bound)), "random integers from ", from, " to ",
                  last, " were asked for, but ", c10::toString(type), " has no ", bound,
                  ": give other bounds, or take another type");
  }
  const auto width = static_cast<std::uint64_t>(last) - static_cast<std::uint64_t>(from) + 1;
  target.local.copy_(integers(target, width).add_(from));
}

void fill_integers_between(const RandomTarget& target, std::int64_t from, std::int64_t to) {
  TESSERA_CHECK(from < to, "random integers from ", from, " to ", to, " were asked for");
  fill_integers_within(target, from, to - 1);
}

// The fills of the operators. Uniform, normal and Bernoulli numbers are drawn by kernels, with the
// same bits on CPU and CUDA; numbers of all other distributions are computed from uniform numbers
// by libtorch functions.

void fill_uniform(const RandomTarget& target, Arguments arguments) {
  const double from = arguments[1].toDouble();
  const double to = arguments[2].toDouble();
  const c10::ScalarType type = target.local.scalar_type();
  TESSERA_CHECK(from <= to, "uniform numbers from ", from, " to ", to, " were asked for");
  TESSERA_CHECK(holds(type, from) && holds(type, to) && holds(type, to - from),
                "uniform numbers from ", from, " to ", to, " were asked for, which ",
                c10::toString(type), " does not hold: give finite bounds within it");
  fill_random(target.local, target.place, kernels::Uniform{from, to - from}, target.key);
}

void fill_normal(const RandomTarget& target, Arguments arguments) {
  const double std = arguments[2].toDouble();
  TESSERA_CHECK(std >= 0.0, "normal numbers with std ", std, " were asked for");
  fill_random(target.local, target.place, kernels::Normal{arguments[1].toDouble(), std},
              target.key);
}

void fill_bernoulli(const RandomTarget& target, Arguments arguments) {
  const double p = arguments[1].toDouble();
  TESSERA_CHECK(p >= 0.0 && p <= 1.0, "a probability of ", p, " was asked for");
  if (target.local.is_floating_point()) {
    return fill_random(target.local, target.place, kernels::Bernoulli{p}, target.key);
  }
  target.local.copy_(numbers(target, kernels::Bernoulli{p}, target.key));
}

void fill_exponential(const RandomTarget& target, Arguments arguments) {
  const double rate = arguments[1].toDouble();
  TESSERA_CHECK(target.local.is_floating_point(), "exponential numbers were asked for in a tensor ",
                "of ", c10::toString(target.local.scalar_type()), ": take a floating-point one");
  TESSERA_CHECK(rate > 0.0, "exponential numbers of rate ", rate, " were asked for");
  target.local.copy_(uniform_numbers(target).log_().div_(-rate));
}

void fill_geometric(const RandomTarget& target, Arguments arguments) {
  const double p = arguments[1].toDouble();
  TESSERA_CHECK(p > 0.0 && p < 1.0, "geometric numbers of probability ", p, " were asked for");
  target.local.copy_(uniform_numbers(target).log_().div_(std::log1p(-p)).ceil_());
}

void fill_cauchy(const RandomTarget& target, Arguments arguments) {
  const double sigma = arguments[2].toDouble();
  TESSERA_CHECK(sigma > 0.0, "Cauchy numbers of sigma ", sigma, " were asked for");
  target.local.copy_(uniform_numbers(target)
                         .sub_(0.5)
                         .mul_(c10::pi<double>)
                         .tan_()
                         .mul_(sigma)
                         .add_(arguments[1].toDouble()));
}

void fill_log_normal(const RandomTarget& target, Arguments arguments) {
  const double std = arguments[2].toDouble();
  TESSERA_CHECK(std > 0.0, "log-normal numbers of std ", std, " were asked for");
  target.local.copy_(
      numbers(target, kernels::Normal{arguments[1].toDouble(), std}, target.key).exp_());
}

/// Draws from all integers that the type of the target represents exactly.
void fill_integers(const RandomTarget& target, Arguments) {
  const std::uint64_t last = last_integer(target.local.scalar_type());
  target.local.copy_(integers(target, last + 1));
}

void fill_integers_to(const RandomTarget& target, Arguments arguments) {
  fill_integers_between(target, 0, arguments[1].toInt());
}

void fill_integers_from(const RandomTarget& target, Arguments arguments) {
  const std::int64_t from = arguments[1].toInt();
  const auto last = static_cast<std::int64_t>(last_integer(target.local.scalar_type()));
  if (arguments[2].isNone()) {
    return fill_integers_within(target, from, last);
  }
  fill_integers_between(target, from, arguments[2].toInt());
}

constexpr std::pair<std::string_view, RandomFill> kFills[] = {
    {"uniform_", &fill_uniform},           {"normal_", &fill_normal},
    {"bernoulli_.float", &fill_bernoulli}, {"exponential_", &fill_exponential},
    {"geometric_", &fill_geometric},       {"cauchy_", &fill_cauchy},
    {"log_normal_", &fill_log_normal},     {"random_", &fill_integers},
    {"random_.to", &fill_integers_to},     {"random_.from", &fill_integers_from},
};

}  // namespace

RandomFill random_fill(std::string_view name) {
  for (const auto& [op, fill] : kFills) {
    if (op == name) {
      return fill;
    }
  }
  return nullptr;
}

RandomSourceScope::RandomSourceScope(at::Tensor source)
    : outer_(std::exchange(RankThread::here().random_source, std::move(source))) {}
RandomSourceScope::~RandomSourceScope() {
  RankThread::here().random_source = std::move(outer_);
}
const at::Tensor& random_source() {
  return RankThread::here().random_source;
}

}  // namespace tessera::detail
