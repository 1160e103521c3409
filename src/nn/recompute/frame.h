#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "recompute/operator_log.h"
#include "recompute/thread_state.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/nn/checkpoint.h"

namespace tessera::nn::detail {

/// A tensor that a region's forward saved for backward: what must match in the recomputation.
class SavedTensor {
 public:
  explicit SavedTensor(const at::Tensor& tensor);
  /// Throws Error if `again`, the `index`-th tensor that the recomputation saves, is another.
  void check(const at::Tensor& again, std::size_t index) const;

 private:
  std::string text() const;
  friend bool operator==(const SavedTensor&, const SavedTensor&) = default;

  std::vector<std::int64_t> sizes_;
  c10::ScalarType dtype_;
  c10::Device device_;
  std::optional<ShardingSpec> sharding_;
};

/// A tensor that a recomputation saved again, until backward takes it.
class RecomputedTensor {
 public:
  explicit RecomputedTensor(const at::Tensor& tensor)
      : tensor_(tensor.detach()), version_(tensor._version()) {}
  /// Throws Error if it was modified in place since it was saved.
  const at::Tensor& get() const;

 private:
  at::Tensor tensor_;
  std::int64_t version_;
};

/// One entry for each tensor that forward saved; empty if it is not needed (any more).
using RecomputedTensors = std::vector<std::optional<RecomputedTensor>>;

/// Everything to run one forward of a checkpointed function again. The placeholders in the graph
/// own it, so that it lives as long as the graph.
class Frame : public std::enable_shared_from_this<Frame> {
 public:
  /// To be made before the region begins, so that an outer region packs the inputs.
  Frame(const CheckpointOptions& options, std::span<at::Tensor* const> inputs, Rerun rerun);

  const CheckpointOptions& options() const { return options_; }

  // In forward.

  /// Records what a tensor is like that autograd does not keep; returns its number.
  std::size_t pack(const at::Tensor& tensor);
  std::size_t packed() const { return saved_.size(); }
  void record_count(std::uint64_t count) { counts_.push_back(count); }
  OperatorLog& operators() { return operators_; }
  void finish();

  // In backward.

  /// The `index`-th tensor, recomputed unless this backward has recomputed it before. Throws what
  /// the function throws, and Error if it does not save the same tensors again.
  at::Tensor unpack(std::size_t index);
  /// The `index`-th tensor is not needed any more.
  void release(std::size_t index) noexcept { saved_[index].needed = false; }

 private:
  friend class Replay;
  struct Saved {
    explicit Saved(const at::Tensor& saved) : tensor(saved) {}
    SavedTensor tensor;
    std::atomic<bool> needed = true;
  };

  RecomputedTensors recompute();
  std::vector<at::Tensor> unpack_inputs() const;
  void forget_after_backward(int graph_task);

  CheckpointOptions options_;
  ThreadState thread_state_;
  // As autograd keeps inputs, and not as tensors: a region around this one replaces them in turn,
  // and versions are checked.
  std::vector<tessera::detail::SavedVariable> inputs_;
  Rerun rerun_;
  // A deque, since an atomic cannot be moved and Saved must stay where it is.
  std::deque<Saved> saved_;
  std::vector<std::uint64_t> counts_;
  OperatorLog operators_;
  // Until finish(), a backward within the forward sees a log that is not complete.
  bool finished_ = false;

  std::mutex mutex_;                             ///< backward may use several threads
  std::map<int, RecomputedTensors> recomputed_;  ///< by graph task
};

}  // namespace tessera::nn::detail
