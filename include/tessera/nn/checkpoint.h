#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
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

#include "tessera/nn/visit_tensors.h"

namespace tessera::nn {

/// Whether an operator's results are kept from forward for the recomputation, or computed again.
enum class SavePolicy { kMustSave, kPreferRecompute };

/// A call of an operator in the forward of a checkpointed region.
struct OperatorCall {
  std::string_view name;  ///< "aten::mm", "aten::sum.dim_IntList"
  std::size_t index = 0;  ///< earlier calls of the same operator in this region
};

/// Asked in forward, for each operator below autograd that makes new tensors of tensors (no views,
/// nothing written in place), on plain and on distributed tensors; and for "tessera::redistribute",
/// the collectives between two layouts. Must answer alike on every rank.
using OperatorPolicy = std::function<SavePolicy(const OperatorCall& call)>;

/// Keeps the results of the operators named, and recomputes the others.
OperatorPolicy save_operators(std::vector<std::string> names);
/// Keeps what matrix multiplications, convolutions and fused attention return: the recomputation
/// repeats only what is cheap (norms, activations, rotary embedding).
OperatorPolicy save_matmuls_and_attention();

/// What checkpointed regions did; one object may count for many.
struct CheckpointCounts {
  std::atomic<std::int64_t> regions = 0;         ///< forwards
  std::atomic<std::int64_t> packed = 0;          ///< tensors that autograd did not keep
  std::atomic<std::int64_t> recomputations = 0;  ///< of regions, in backward
  std::atomic<std::int64_t> repacked = 0;        ///< tensors that those made again
  std::atomic<std::int64_t> early_stops = 0;     ///< recomputations that did not run to the end
  // With an operator policy:
  std::atomic<std::int64_t> kept_operators = 0;        ///< in forward
  std::atomic<std::int64_t> replayed_operators = 0;    ///< not run again: forward's results
  std::atomic<std::int64_t> recomputed_operators = 0;  ///< run again
};

struct CheckpointOptions {
  /// Selective checkpointing; none: everything is recomputed.
  OperatorPolicy policy{};
  /// Recomputation ends as soon as the last tensor that forward saved was made again.
  bool early_stop = true;
  /// Recomputation draws the random numbers of forward, and leaves the generators as it found them:
  /// those of tessera::manual_seed, and libtorch's for the CPU and the devices of the inputs.
  bool preserve_rng_state = true;
  /// Each recomputed tensor must have the sizes, type, device and layout that forward's had.
  bool check_determinism = true;
  std::shared_ptr<CheckpointCounts> counts{};
};

/// Whether this thread is computing a part of a forward again, for backward.
bool is_recomputing();

/// `counter++`; while a region is recomputed, instead what this call returned in the region's
/// forward. For modules with a state that moves with every call, as nn::Dropout's.
std::uint64_t replayed_count(std::uint64_t& counter);

namespace detail {

using Rerun = std::function<void(std::span<const at::Tensor> inputs)>;
class RegionForward;

/// While it lives, on this thread: autograd keeps placeholders instead of tensors, from which
/// `rerun` is called in backward. Does nothing where no gradient is recorded.
class RecordedRegion {
 public:
  RecordedRegion(const CheckpointOptions& options, std::span<at::Tensor* const> inputs,
                 Rerun rerun);
  ~RecordedRegion();
  RecordedRegion(const RecordedRegion&) = delete;
  RecordedRegion& operator=(const RecordedRegion&) = delete;

  /// The forward has ended well.
  void finish();

 private:
  std::unique_ptr<RegionForward> forward_;
};

}  // namespace detail

/// Activation checkpointing (Chen et al. 2016), not reentrant, as PyTorch's
/// checkpoint(use_reentrant=False): runs fn(inputs...) and keeps, of what autograd would keep for
/// backward, only the inputs; when backward first needs one of the others, fn runs again under the
/// random, autocast, strict and batch-part state of its forward. Returns what fn returns. Regions
/// may nest, and a graph may be used several times.
///
///   const at::Tensor y = nn::checkpoint([&](const at::Tensor& x) { return (*block)(x); }, x);
///
/// fn: copied, called up to once more a backward; must not hold references to what ends before
/// backward. inputs: copied; the tensors in them are those that visit_tensors finds, and must not
/// be changed in place before backward.
/// Recomputation repeats fn's collectives, in the same order on every rank. Backward throws Error
/// if the recomputation saves other tensors than the forward did, and if an input or a kept result
/// was modified since. Throws Error in a process whose autograd engine is another's (Python's).
template <class F, class... Inputs>
requires std::invocable < F&, std::decay_t<Inputs>
&... > auto checkpoint(const CheckpointOptions& options, F fn, Inputs&&... inputs) {
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
  detail::RecordedRegion region(options, collect_tensors(arguments), std::move(rerun));
  if constexpr (std::is_void_v<decltype(std::apply(fn, arguments))>) {
    std::apply(fn, arguments);
    region.finish();
  } else {
    auto result = std::apply(fn, arguments);
    region.finish();
    return result;
  }
}

template <class F, class... Inputs>
requires std::invocable < F&, std::decay_t<Inputs>
&... > auto checkpoint(F fn, Inputs&&... inputs) {
  return checkpoint(CheckpointOptions{}, std::move(fn), std::forward<Inputs>(inputs)...);
}

}  // namespace tessera::nn
