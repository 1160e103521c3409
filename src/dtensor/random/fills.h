// Random numbers by the element of the whole tensor.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <mutex>
#include <span>

#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/random.h"

namespace tessera::detail {

/// The elements for which an operator of at:: draws, and the key of its numbers.
struct RandomTarget {
  const at::Tensor& local;  ///< plain, not meta
  const RandomPlace& place;
  RandomKey key;
};

/// Fills the target with the random numbers that the operator's other arguments ask for. Without
/// autograd. Throws Error for arguments that libtorch refuses too.
using RandomFill = void (*)(const RandomTarget& target, std::span<const c10::IValue> arguments);
void fill_uniform(const RandomTarget& target, std::span<const c10::IValue> arguments);
void fill_normal(const RandomTarget& target, std::span<const c10::IValue> arguments);
void fill_bernoulli(const RandomTarget& target, std::span<const c10::IValue> arguments);
void fill_exponential(const RandomTarget& target, std::span<const c10::IValue> arguments);
void fill_geometric(const RandomTarget& target, std::span<const c10::IValue> arguments);
void fill_cauchy(const RandomTarget& target, std::span<const c10::IValue> arguments);
void fill_log_normal(const RandomTarget& target, std::span<const c10::IValue> arguments);
/// random_: all integers that the type holds and does not round.
void fill_integers(const RandomTarget& target, std::span<const c10::IValue> arguments);
/// random_.to: from 0 on.
void fill_integers_to(const RandomTarget& target, std::span<const c10::IValue> arguments);
/// random_.from, with an end or without one.
void fill_integers_from(const RandomTarget& target, std::span<const c10::IValue> arguments);

/// The end of a message, after the operator's name.
inline constexpr const char* kDrawsInOrder =
    " draws its numbers one after another, so that ranks with different parts of one tensor can't "
    "draw what one rank does; draw before forward, or uniform, normal, exponential or Bernoulli "
    "numbers, which are drawn by element";

/// While it exists, tensors that this thread draws for have their sizes from `source`: an operator
/// that is composed of others (dropout) makes a tensor without that history, and fills it.
class RandomSourceScope {
 public:
  explicit RandomSourceScope(at::Tensor source);
  ~RandomSourceScope();
  RandomSourceScope(const RandomSourceScope&) = delete;
  RandomSourceScope& operator=(const RandomSourceScope&) = delete;

 private:
  at::Tensor outer_;
};
const at::Tensor& random_source();

/// The key of the next random operator of this rank. Each call counts: ranks stay in step
/// by making the same calls.
RandomKey next_random_key();

/// For random operators that are gathered (CallPlan::seeded): all ranks run the whole one and must
/// draw the same. While it lives, the default generator of `device` draws the numbers of `key`.
/// Ranks that are threads of one process take turns.
class SeededGenerator {
 public:
  SeededGenerator(c10::Device device, RandomKey key);
  ~SeededGenerator();
  SeededGenerator(const SeededGenerator&) = delete;
  SeededGenerator& operator=(const SeededGenerator&) = delete;

 private:
  std::unique_lock<std::mutex> turn_;
  at::Generator generator_;
  at::Tensor outer_;
};

}  // namespace tessera::detail
