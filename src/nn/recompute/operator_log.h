#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "recompute/thread_state.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/nn/checkpoint.h"

namespace tessera::nn::detail {

/// The operators' results that a region's policy kept.
class OperatorLog {
 public:
  using Results = OperatorMode::Results;

  /// `packed`: how many tensors autograd had kept by then.
  void keep(const std::string& name, std::size_t index, const Results& results, std::size_t packed,
            std::optional<RandomSnapshot> random_after);
  /// Has the tensors in `results` count writes together with the kept results whose memory they
  /// share.
  void watch_aliases(const Results& results);
  /// Forgets what came after the last tensor that autograd kept: recomputation stops before it.
  void forget_after(std::size_t packed);
  /// The results of a call, or nullopt if they are not kept (any more). `last`: they will not be
  /// asked for again. Leaves the generators as the operator did. Throws Error if a result was
  /// modified in place since.
  std::optional<Results> replay(const std::string& name, std::size_t index, bool last);

 private:
  struct Kept {
    Results results;
    std::vector<std::uint32_t> versions;  ///< of the tensors in the results
    std::size_t packed = 0;
    std::optional<RandomSnapshot> random_after;
  };
  // By operator and the number of its call.
  std::unordered_map<std::string, std::map<std::size_t, Kept>> kept_;
};

/// In forward: keeps the results that the policy names. An existing mode is called too.
class RecordOperators final : public OperatorMode {
 public:
  RecordOperators(OperatorLog& log, const CheckpointOptions& options,
                  std::function<std::size_t()> packed, std::span<at::Tensor* const> inputs);
  Results call(const Operator& op, const std::function<Results()>& run) override;

 private:
  OperatorLog& log_;
  const CheckpointOptions& options_;
  // Asked at each kept call, since autograd saves tensors in between.
  std::function<std::size_t()> packed_;
  std::optional<RandomSnapshot> random_;  ///< names the generators
  OperatorMode* outer_ = active_operator_mode();
  std::unordered_map<std::string, std::size_t> calls_;
};

/// In recomputation: returns what was kept.
class ReplayOperators final : public OperatorMode {
 public:
  ReplayOperators(OperatorLog& log, CheckpointCounts* counts) : log_(log), counts_(counts) {}
  Results call(const Operator& op, const std::function<Results()>& run) override;

 private:
  OperatorLog& log_;
  CheckpointCounts* counts_;
  OperatorMode* outer_ = active_operator_mode();
  std::unordered_map<std::string, std::size_t> calls_;
};

}  // namespace tessera::nn::detail
