// Random fills, in which each number depends on the element's index in the whole tensor.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <mutex>
#include <span>
#include <string_view>

#include "tessera/core/detail/no_copy.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/random.h"

namespace tessera::detail {

/// The local tensor that a random operator of at:: fills, and the random key of the numbers.
struct RandomTarget {
  const at::Tensor& local;  ///< a plain tensor, not on the meta device
  const RandomPlace& place;
  RandomKey key;
};

/// A function that fills `target` with random numbers, below autograd. `arguments`: the operator's
/// arguments, which define the distribution. Throws Error for arguments that libtorch refuses.
using RandomFill = void (*)(const RandomTarget& target, std::span<const c10::IValue> arguments);
/// Returns the function that fills a tensor for an operator with Trait::kRandomInplace, such as
/// "uniform_"; nullptr for any other operator.
RandomFill random_fill(std::string_view name);

/// The end of the error message for operators that draw their numbers one after another.
inline constexpr const char* kDrawsInOrder =
    " draws numbers one after another, so ranks with different parts of a tensor can't draw the "
    "numbers of a run on one rank; draw before forward, or draw uniform, normal, exponential or "
    "Bernoulli numbers, which depend only on the element";

/// While a RandomSourceScope exists, tensors that this thread fills count as computed from
/// `source`. Composed operators such as dropout fill new tensors, whose batch rows would otherwise
/// be unknown.
class RandomSourceScope : NoCopy {
 public:
  explicit RandomSourceScope(at::Tensor source);
  ~RandomSourceScope();

 private:
  at::Tensor outer_;
};
const at::Tensor& random_source();

/// Takes the random key of this rank's next random operator. All ranks must take equally many keys.
RandomKey next_random_key();

/// Seeds the default generator of `device` from a random key, so that all ranks draw the same
/// numbers for a gathered tensor. Ranks that are threads enter such scopes in turn.
class SeededGenerator : NoCopy {
 public:
  SeededGenerator(c10::Device device, RandomKey key);
  ~SeededGenerator();

 private:
  std::unique_lock<std::mutex> turn_;
  at::Generator generator_;
  at::Tensor outer_;
};

}  // namespace tessera::detail
