#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "recompute/checkpointed_region.h"
#include "recompute/frame.h"

namespace tessera::nn::detail {

/// Thrown out of a recomputation that has made all that is needed. Not a std::exception, so that
/// the function's own handlers let it pass.
struct StopRecomputation {};

/// The recomputation of a frame, while it lives: takes the tensors that autograd would keep.
class Replay final : public CheckpointedRegion {
 public:
  explicit Replay(Frame& frame);

  /// Takes the next tensor; throws StopRecomputation after the last.
  void pack(const at::Tensor& tensor);
  /// The function has returned. Throws Error if it has saved too little.
  void finish();
  RecomputedTensors take() { return std::move(tensors_); }

  std::unique_ptr<tessera::detail::SavedVariableHooks> hooks() override;
  bool replays() const override { return true; }
  std::uint64_t replay_count() override;
  void record_count(std::uint64_t) override {}

 private:
  Frame& frame_;
  RecomputedTensors tensors_;
  // How many tensors autograd has wanted to keep, and how many counts were asked for: positions in
  // what the forward recorded.
  std::size_t packed_ = 0;
  std::size_t next_count_ = 0;
  std::optional<ReplayOperators> operators_;
  std::optional<OperatorModeScope> mode_;
};

}  // namespace tessera::nn::detail
