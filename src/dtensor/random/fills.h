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

/// The target of a random fill: a local tensor that an at:: operator fills, and the random key.
struct RandomTarget {
  const at::Tensor& local;  ///< the tensor to fill; a plain tensor, not on the meta device
  const RandomPlace& place;
  RandomKey key;
};

/// A function that fills the target, below autograd, with random numbers. The operator's remaining
/// arguments define the distribution. Throws Error for arguments that libtorch also refuses.
using RandomFill = void (*)(const RandomTarget& target, std::span<const c10::IValue> arguments);
/// Returns the function that fills a tensor for an operator with Trait::kRandomInplace, such as
/// "uniform_"; nullptr for any other operator.
RandomFill random_fill(std::string_view name);

/// The end of an error message about an operator that draws sequentially. The message begins with
/// the operator's name.
inline constexpr const char* kDrawsInOrder =
    " draws its numbers one after another, so that ranks with different parts of one tensor can't "
    "draw what one rank does; draw before forward, or uniform, normal, exponential or Bernoulli "
    "numbers, which are drawn by element";

/// In this scope, a tensor that this thread fills with random numbers counts as computed from the
/// tensor `source`. Composed operators (dropout) need the scope, because they fill a new tensor,
/// which has no autograd history of their input.
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

/// A scope for random operators that are gathered (CallPlan::seeded): all ranks run the whole
/// operator and must draw the same numbers. In the scope the random key seeds the default generator
/// of `device`. Ranks that are threads of one process enter such scopes one after another.
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
