#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <cstdint>
#include <memory>

namespace tessera::nn::detail {

/// A part of a forward that this thread is inside of: the forward of a checkpointed function, or
/// its recomputation. Regions nest; the innermost one decides what autograd keeps.
class Region {
 public:
  Region();
  virtual ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  /// For the next tensor that autograd wants to keep.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;
  /// See replayed_count(): whether this is a recomputation, and then the count of the forward.
  virtual bool replays() const = 0;
  virtual std::uint64_t replay_count() = 0;
  virtual void record_count(std::uint64_t count) = 0;

  Region* outer() const { return outer_; }
  static Region* innermost();

 private:
  Region* outer_;
};

/// nullptr outside of regions.
std::unique_ptr<torch::autograd::SavedVariableHooks> hooks_of_innermost_region();

}  // namespace tessera::nn::detail
