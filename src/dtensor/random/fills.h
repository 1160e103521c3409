// Random fills that depend on each element's index in the whole tensor.
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

/// A local tensor that an at:: operator fills with random numbers, and the random key.
struct RandomTarget {
  const at::Tensor& local;  ///< the tensor to fill; plain, not on the meta device
  const RandomPlace& place;
  RandomKey key;
};

/// A function that fills the target with random numbers of the distribution that the operator's
/// other arguments define. Without autograd. Throws Error for arguments that libtorch refuses too.
using RandomFill = void (*)(const RandomTarget& target, std::span<const c10::IValue> arguments);
/// Returns the function that fills a tensor for an operator with Trait::kRandomInplace, such as
/// "uniform_"; nullptr for any other operator.
RandomFill random_fill(std::string_view name);

/// The end of an error message about an operator that draws sequentially. The operator's name
/// precedes it.
inline constexpr const char* kDrawsInOrder =
    " draws its numbers one after another, so that ranks with different parts of one tensor can't "
    "draw what one rank does; draw before forward, or uniform, normal, exponential or Bernoulli "
    "numbers, which are drawn by element";

/// During this scope, tensors that this thread fills with random numbers count as having their
/// sizes from `source`. A composed operator (dropout) needs the scope: it makes a new tensor
/// without the history of its input, and fills it.
class RandomSourceScope : NoCopy {
 public:
  explicit RandomSourceScope(at::Tensor source);
  ~RandomSourceScope();

 private:
  at::Tensor outer_;
};
const at::Tensor& random_source();

/// Takes the key of this rank's next random operator. All ranks must make the same calls.
RandomKey next_random_key();

/// A scope for random operators that are gathered (CallPlan::seeded): all ranks run the whole
/// operator and must draw the same numbers. During the scope the default generator of `device` is
/// seeded by `key`. Ranks that are threads of one process enter such scopes one after another.
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
