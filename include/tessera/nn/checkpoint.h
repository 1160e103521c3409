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

/// Returns whether a checkpointed forward saves the results of an operator call; otherwise backward
/// runs the operator again. Called for operators that make new tensors, not for views and in-place
/// operators. A redistribution is one call of "tessera::redistribute". The function must return the
/// same on every rank.
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
/// tensors. The first placeholder that backward unpacks calls `rerun`, which runs the forward
/// again.
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
/// Runs fn(inputs...) and returns the result. Autograd saves only the inputs. Backward runs fn
/// again, with forward's random numbers and autocast state. Regions may nest.
///
///   const at::Tensor y = nn::checkpoint([&](const at::Tensor& x) { return (*block)(x); }, x);
///
/// `fn` and `inputs` are copied. Objects to which `fn` refers must exist until backward. Input
/// tensors must not be modified before backward. If fn is collective, backward is collective, too.
/// Backward throws Error for modified inputs, and if fn saves other tensors than in forward. Throws
/// Error with another autograd engine, such as Python's.
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
