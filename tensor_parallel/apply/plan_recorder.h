#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/trace.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/plan_table.h"

namespace tessera::tensor_parallel {

/// Records which style causes which collectives in a step. Hooks before and after a style's own
/// hooks see how it changes a call's tensors; hooks on the autograd nodes that it made see the same
/// in backward.
class PlanRecorder : public std::enable_shared_from_this<PlanRecorder> {
 public:
  /// Counts what this rank sends in the mesh's world.
  explicit PlanRecorder(const DeviceMesh& mesh) : counter_(mesh.world()->traffic()) {}

  /// Watches the beginning of forward and backward of `root`, to which the plan is applied. To be
  /// called before others add hooks to it.
  void watch_root(nn::ModuleBase& root);
  /// Before and after a style adds its hooks to `module`; `application`: its number in the plan.
  void begin_style(nn::ModuleBase& module);
  void end_style(nn::ModuleBase& module, std::size_t application);

  /// Records while `step` runs, once. Collective as the step is.
  void run(const std::function<void()>& step);

  /// The record of a style, in the order of the calls; equal ones are added up.
  std::vector<PlannedCollective> of(std::size_t application) const;
  /// The collectives that no style caused.
  std::vector<PlannedCollective> elsewhere() const;

 private:
  /// Calls [first, last) that a style caused.
  struct Span {
    std::int64_t first, last;
    std::size_t application;
    std::string reason;
  };

  /// The number of calls since run() began.
  std::int64_t now() const { return comm::total(counter_.table()).calls - start_; }
  void enter(nn::TensorList tensors);
  void leave(std::size_t application, const char* what, nn::TensorList tensors);
  void watch_backward(std::size_t application, const std::string& reason, nn::TensorList tensors);
  void enter_node() { entered_ = now(); }
  void begin_phase(bool backward);
  void leave_node(std::size_t application, const std::string& reason);
  bool is_backward(std::size_t call) const;

  comm::TrafficCounter& counter_;
  bool records_ = false;
  std::int64_t start_ = 0;
  std::int64_t entered_ = 0;        ///< when the style, or the node, that runs now began
  std::vector<at::Tensor> before_;  ///< what the style was given
  /// The first call of each forward and backward, in order.
  std::vector<std::pair<std::int64_t, bool>> phases_;
  std::vector<Span> spans_;
  std::vector<comm::CollectiveCall> calls_;
};

}  // namespace tessera::tensor_parallel
