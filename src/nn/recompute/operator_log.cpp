// Selective checkpointing: keeps results of operators that a policy names in forward, and returns
// them in the recomputation instead of running the operators. Calls are identified by operator and
// number, since the recomputation makes the same calls in the same order.

#include "recompute/operator_log.h"

#include <ATen/core/Tensor.h>

#include <utility>

#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/kernels/detail/tensors_in_values.h"

namespace tessera::nn::detail {
namespace {

using tessera::local_tensor;

using Results = OperatorMode::Results;

/// The same values and version counter without autograd's state, since autograd attaches its own to
/// every result.
at::Tensor unrecorded(const at::Tensor& tensor) {
  // The counter is shared: an in-place write to the result is then seen in what is kept.
  return tessera::detail::alias_tensor(tensor, /*allows_change=*/false);
}

Results unrecorded_all(const Results& results) {
  Results copies;
  copies.reserve(results.size());
  for (const c10::IValue& result : results) {
    copies.push_back(kernels::with_tensors(result, unrecorded));
  }
  return copies;
}

/// One for each tensor: numbers have no version.
std::vector<std::uint32_t> versions_of(const Results& results) {
  std::vector<std::uint32_t> versions;
  kernels::visit_tensors(results, [&](const at::Tensor& tensor) {
    versions.push_back(tessera::detail::writes_of(tensor));
  });
  return versions;
}

Results call_next(OperatorMode* outer, const OperatorMode::Operator& op,
                  const std::function<Results()>& run) {
  return outer != nullptr ? outer->call(op, run) : run();
}

}  // namespace

void OperatorLog::keep(const std::string& name, std::size_t index, const Results& results,
                       std::size_t packed, std::optional<RandomSnapshot> random_after) {
  kept_[name][index] = {unrecorded_all(results), versions_of(results), packed,
                        std::move(random_after)};
}

void OperatorLog::watch_aliases(const Results& results) {
  kernels::visit_tensors(results, [&](const at::Tensor& result) {
    for (const auto& [name, calls] : kept_) {
      for (const auto& [index, kept] : calls) {
        kernels::visit_tensors(kept.results, [&](const at::Tensor& tensor) {
          if (local_tensor(tensor).is_alias_of(local_tensor(result))) {
            tessera::detail::count_with(result, tensor);
          }
        });
      }
    }
  });
}

void OperatorLog::forget_after(std::size_t packed) {
  for (auto& [name, calls] : kept_) {
    // Recomputation stops when it has saved as many tensors, so that it never comes to these.
    std::erase_if(calls, [&](const auto& call) { return call.second.packed == packed; });
  }
}

std::optional<Results> OperatorLog::replay(const std::string& name, std::size_t index, bool last) {
  auto& calls = kept_[name];
  const auto found = calls.find(index);
  if (found == calls.end()) {
    return std::nullopt;
  }
  const Kept& kept = found->second;
  TESSERA_CHECK(versions_of(kept.results) == kept.versions, "checkpoint: the result of ", name,
                ", call ", index,
                " of its region, was kept and then modified in place; let the "
                "policy recompute it, or write to a copy");
  if (kept.random_after) {
    // The operator does not run, so the generators would not advance, and later operators would
    // draw other numbers.
    kept.random_after->restore();
  }
  Results results = unrecorded_all(kept.results);
  // Without retain_graph they are not used again: freed while backward continues.
  if (last) {
    calls.erase(found);
  }
  return results;
}

RecordOperators::RecordOperators(OperatorLog& log, const CheckpointOptions& options,
                                 std::function<std::size_t()> packed,
                                 std::span<at::Tensor* const> inputs)
    : log_(log), options_(options), packed_(std::move(packed)) {
  if (options.preserve_rng_state) {
    random_.emplace(inputs);
  }
}

Results RecordOperators::call(const Operator& op, const std::function<Results()>& run) {
  // The operator runs in any case; the policy only says whether its results stay.
  Results results = call_next(outer_, op, run);
  const std::size_t index = calls_[op.name]++;
  if (options_.policy({op.name, index}) == SavePolicy::kMustSave) {
    std::optional<RandomSnapshot> after;
    if (op.draws_random && random_) {
      after.emplace(random_->retaken());
    }
    log_.keep(op.name, index, results, packed_(), std::move(after));
    if (options_.counts != nullptr) {
      ++options_.counts->kept_operators;
    }
  } else if (op.name == "aten::_unsafe_view") {
    // The end of a matmul, which does not tell libtorch that it shares memory.
    log_.watch_aliases(results);
  }
  return results;
}

Results ReplayOperators::call(const Operator& op, const std::function<Results()>& run) {
  // Whether this backward keeps its graph, so that another one may come.
  const bool last = !tessera::detail::keeps_graph();
  const std::size_t index = calls_[op.name]++;
  std::optional<Results> kept = log_.replay(op.name, index, last);
  if (counts_ != nullptr) {
    ++(kept ? counts_->replayed_operators : counts_->recomputed_operators);
  }
  return kept ? std::move(*kept) : call_next(outer_, op, run);
}

}  // namespace tessera::nn::detail
