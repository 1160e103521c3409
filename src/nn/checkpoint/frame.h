#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "operator_log.h"
#include "saved_tensor.h"
#include "surroundings.h"
#include "tessera/nn/checkpoint.h"

namespace tessera::nn::detail {

/// One forward of a checkpointed function: all that is needed to run it again. The placeholders in
/// the graph own it, so that it goes with the graph.
class Frame : public std::enable_shared_from_this<Frame> {
 public:
  /// To be made outside of the region: a region around it packs the inputs.
  Frame(const CheckpointOptions& options, std::span<at::Tensor* const> inputs, Rerun rerun);

  const CheckpointOptions& options() const { return options_; }

  // In forward.

  /// Notes a tensor that autograd is not to keep; returns its number.
  std::size_t pack(const at::Tensor& tensor);
  std::size_t packed() const { return saved_.size(); }
  void record_count(std::uint64_t count) { counts_.push_back(count); }
  OperatorLog& operators() { return operators_; }
  void finish();

  // In backward.

  /// The `index`-th tensor, recomputed unless this backward has it already. Throws what the
  /// function throws, and Error if it does not save the same tensors again.
  at::Tensor unpack(std::size_t index);
  /// Nobody will ask for the `index`-th tensor any more.
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
  Surroundings surroundings_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  Rerun rerun_;
  std::deque<Saved> saved_;
  std::vector<std::uint64_t> counts_;
  OperatorLog operators_;
  bool finished_ = false;

  std::mutex mutex_;                             ///< backward may use several threads
  std::map<int, RecomputedTensors> recomputed_;  ///< by graph task
};

}  // namespace tessera::nn::detail
