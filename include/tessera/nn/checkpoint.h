#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"
#include "tessera/nn/visit_tensors.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// An operator call in the forward of a checkpointed region.
struct OperatorCall {
  std::string_view name;  ///< name of the operator, such as "aten::mm" or "aten::sum.dim_IntList"
  std::size_t index = 0;  ///< number of earlier calls of the same operator in the region
};

/// A function that is called for each operator call in a checkpointed forward. If the function
/// returns true, the results of the call are saved; otherwise the recomputation runs the operator
/// again. The function is called for operators that make new tensors, plain or distributed, not for
/// views and in-place operators. A redistribution is one call of "tessera::redistribute". The
/// function must return the same value on every rank.
using OperatorPolicy = std::function<bool(const OperatorCall& call)>;

/// Returns a policy that saves only the results of the operators in `names`.
OperatorPolicy save_operators(std::vector<std::string> names);
/// Returns a policy that saves the results of matrix multiplications, convolutions and fused
/// attention. Cheap operators (norms, activations, rotary embedding) are recomputed.
OperatorPolicy save_matmuls_and_attention();

struct CheckpointCounts;

/// Options of a checkpointed region.
struct CheckpointOptions {
  /// Selects the operators whose results are saved (selective activation checkpointing). If empty,
  /// no operator's results are saved.
  OperatorPolicy policy{};
  /// For tests: counts the checkpointed regions and their recomputations.
  std::shared_ptr<CheckpointCounts> counts{};
};

namespace detail {

using Rerun = std::function<void(std::span<const at::Tensor> inputs)>;
class CheckpointedForward;

/// While a CheckpointedRegionScope exists, autograd on this thread saves placeholders instead of
/// tensors. When backward unpacks the first placeholder, the placeholder calls `rerun`, which runs
/// the forward again. Without gradient recording the scope does nothing.
class CheckpointedRegionScope : tessera::detail::NoCopy {
 public:
  CheckpointedRegionScope(const CheckpointOptions& options, std::span<at::Tensor* const> inputs,
                          Rerun rerun);
  ~CheckpointedRegionScope();

  /// Ends the checkpointed region. Must be called after the forward, unless the forward throws.
  void finish();

 private:
  std::unique_ptr<CheckpointedForward> forward_;
};

}  // namespace detail

/// Activation checkpointing (Chen et al. 2016), like PyTorch's checkpoint(use_reentrant=False).
/// Runs fn(inputs...) and returns the result. Autograd saves only the inputs. When backward needs
/// another tensor, backward runs fn again, and stops fn when all tensors that backward needs are
/// recomputed. The recomputation has forward's autocast state, StrictScope, range of batch rows and
/// random numbers (tessera::manual_seed, and libtorch's generators for the CPU and the inputs'
/// devices). Regions may nest, and backward may run several times.
///
///   const at::Tensor y = nn::checkpoint([&](const at::Tensor& x) { return (*block)(x); }, x);
///
/// `fn` is copied, and called at most once more in each backward. `fn` must not refer to objects
/// that are destroyed before backward. `inputs` are copied. The tensors that visit_tensors finds in
/// `inputs` must not be modified in place before backward. If fn is collective, backward is
/// collective, too: the recomputation repeats fn's collectives, in the same order on every rank.
/// Backward throws Error if the recomputation saves tensors of other sizes, types, devices or
/// layouts than forward, or if an input or a saved result was modified after forward. Throws Error
/// in a process with another autograd engine than libtorch's, such as Python's.
template <class F, class... Inputs>
  requires std::invocable<F&, std::decay_t<Inputs>&...>
auto checkpoint(const CheckpointOptions& options, F fn, Inputs&&... inputs) {
  std::tuple<std::decay_t<Inputs>...> arguments(std::forward<Inputs>(inputs)...);
  auto others = arguments;
  visit_tensors(others, [](at::Tensor& tensor) { tensor.reset(); });
  detail::Rerun rerun = [fn, others = std::move(others)](std::span<const at::Tensor> tensors) {
    auto again = others;
    std::size_t next = 0;
    visit_tensors(again, [&](at::Tensor& tensor) { tensor = tensors[next++]; });
    F call = fn;
    std::apply(call, again);
  };
  detail::CheckpointedRegionScope region(options, detail::collect_tensors(arguments),
                                         std::move(rerun));
  if constexpr (std::is_void_v<decltype(std::apply(fn, arguments))>) {
    std::apply(fn, arguments);
    region.finish();
  } else {
    auto result = std::apply(fn, arguments);
    region.finish();
    return result;
  }
}

/// Runs checkpoint() with the default options: no operator's results are saved.
template <class F, class... Inputs>
  requires std::invocable<F&, std::decay_t<Inputs>&...>
auto checkpoint(F fn, Inputs&&... inputs) {
  return checkpoint(CheckpointOptions{}, std::move(fn), std::forward<Inputs>(inputs)...);
}

}  // namespace tessera::nn
TESSERA_API_END
