#include "samples/permutation.h"

namespace tessera::data {
namespace {

/// Each bit of the result depends on all of `value`: the finalizer of splitmix64 (Steele et al.
/// 2014).
std::uint64_t mix(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

}  // namespace

Permutation::Permutation(std::int64_t count, std::uint64_t seed, std::uint64_t number)
    : count_(static_cast<std::uint64_t>(count)) {
  while (half_bits_ < 31 && (std::uint64_t{1} << (2 * half_bits_)) < count_) {
    ++half_bits_;
  }
  std::uint64_t key = mix(mix(seed) ^ number);
  for (std::uint64_t& round : keys_) {
    round = key = mix(key);
  }
}

std::int64_t Permutation::operator()(std::int64_t index) const {
  auto value = static_cast<std::uint64_t>(index);
  do {
    value = encipher(value);
  } while (value >= count_);
  return static_cast<std::int64_t>(value);
}

std::uint64_t Permutation::encipher(std::uint64_t value) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  std::uint64_t left = value >> half_bits_;
  std::uint64_t right = value & mask;
  for (const std::uint64_t key : keys_) {
    const std::uint64_t next = left ^ (mix(right ^ key) & mask);
    left = right;
    right = next;
  }
  return (left << half_bits_) | right;
}

}  // namespace tessera::data
