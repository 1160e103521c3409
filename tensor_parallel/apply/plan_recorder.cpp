// Runs a step and assigns each collective to the style in whose hooks, or in whose autograd nodes,
// it started. Styles need not describe themselves, so the record is right for a program's styles as
// well, and for tensors that another style has distributed.

#include "apply/plan_recorder.h"

#include <algorithm>
#include <unordered_set>

#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/nn/checkpoint.h"

namespace tessera::tensor_parallel {
namespace {

using tessera::detail::Node;
using Nodes = std::unordered_set<Node*>;

/// The node that computed a tensor; nullptr if autograd has not recorded it.
Node* node_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad() ? tensor.grad_fn().get() : nullptr;
}

/// The nodes between a tensor and `known` ones, or leaves.
std::vector<Node*> nodes_since(const at::Tensor& tensor, Nodes known) {
  std::vector<Node*> found;
  std::vector<Node*> waiting{node_of(tensor)};
  while (!waiting.empty()) {
    Node* node = waiting.back();
    waiting.pop_back();
    // A leaf's node has no next nodes: it accumulates the gradient.
    if (node == nullptr || node->next_edges().empty() || !known.insert(node).second) {
      continue;
    }
    found.push_back(node);
    for (const tessera::detail::Edge& edge : node->next_edges()) {
      waiting.push_back(edge.function.get());
    }
  }
  return found;
}

std::string placement_text(const at::Tensor& tensor) {
  if (!tessera::is_distributed(tensor)) {
    return "plain";
  }
  return to_string(DistributedTensor(tensor).placements());
}

/// "input [Shard(0)] -> [Replicate()]", for the first tensor that the style has changed.
std::string reason_of(const char* what, const std::vector<at::Tensor>& before,
                      nn::TensorList after) {
  for (std::size_t i = 0; i < before.size() && i < after.size(); ++i) {
    if (!before[i].is_same(*after[i])) {
      return detail::concat(what, " ", placement_text(before[i]), " -> ",
                            placement_text(*after[i]));
    }
  }
  return what;
}

/// Adds a call to the list, or counts it in an entry that is otherwise equal.
void add_call(std::vector<PlannedCollective>& list, const comm::CollectiveCall& call, bool backward,
              const std::string& reason) {
  const auto same = std::ranges::find_if(list, [&](const PlannedCollective& known) {
    return known.group == call.group && known.collective == call.collective &&
           known.backward == backward && known.reason == reason;
  });
  PlannedCollective& entry =
      same != list.end()
          ? *same
          : list.emplace_back(PlannedCollective{call.group, call.collective, backward, reason, {}});
  ++entry.traffic.calls;
  entry.traffic.bytes += call.bytes;
}

}  // namespace

void PlanRecorder::watch_root(nn::ModuleBase& root) {
  root.add_forward_pre_hook(
      [self = shared_from_this()](auto&, nn::TensorList) { self->begin_phase(false); });
  root.add_forward_hook([self = shared_from_this()](auto&, nn::TensorList outputs) {
    for (const at::Tensor* output : outputs) {
      if (output->defined() && output->requires_grad()) {
        output->register_hook([self](const at::Tensor&) { self->begin_phase(true); });
      }
    }
  });
}

void PlanRecorder::begin_phase(bool backward) {
  if (records_ && !nn::is_recomputing()) {
    phases_.emplace_back(now(), backward);
  }
}

void PlanRecorder::begin_style(nn::ModuleBase& module) {
  const auto enter = [self = shared_from_this()](auto&, nn::TensorList tensors) {
    self->enter(tensors);
  };
  module.add_forward_pre_hook(enter);
  module.add_forward_hook(enter);
}

void PlanRecorder::end_style(nn::ModuleBase& module, std::size_t application) {
  const auto leave = [self = shared_from_this(), application](const char* what) {
    return [self, application, what](auto&, nn::TensorList tensors) {
      self->leave(application, what, tensors);
    };
  };
  module.add_forward_pre_hook(leave("input"));
  module.add_forward_hook(leave("result"));
}

void PlanRecorder::enter(nn::TensorList tensors) {
  if (!records_) {
    return;
  }
  before_.clear();
  for (const at::Tensor* tensor : tensors) {
    before_.push_back(*tensor);
  }
  entered_ = now();
}

void PlanRecorder::leave(std::size_t application, const char* what, nn::TensorList tensors) {
  if (!records_) {
    return;
  }
  const std::string reason = reason_of(what, before_, tensors);
  spans_.push_back(
      {entered_, now(), application, reason + (nn::is_recomputing() ? ", computed again" : "")});
  watch_backward(application, "gradient of " + reason, tensors);
  before_.clear();
}

void PlanRecorder::watch_backward(std::size_t application, const std::string& reason,
                                  nn::TensorList tensors) {
  Nodes known;
  for (const at::Tensor& tensor : before_) {
    known.insert(node_of(tensor));
  }
  for (const at::Tensor* tensor : tensors) {
    for (Node* node : nodes_since(*tensor, known)) {
      tessera::detail::watch_node(
          *node, [self = shared_from_this()] { self->enter_node(); },
          [self = shared_from_this(), application, reason] {
            self->leave_node(application, reason);
          });
      known.insert(node);
    }
  }
}

void PlanRecorder::leave_node(std::size_t application, const std::string& reason) {
  if (records_) {
    spans_.push_back({entered_, now(), application, reason});
  }
}

void PlanRecorder::run(const std::function<void()>& step) {
  start_ = comm::total(counter_.table()).calls;
  const comm::CallRecorder recorder(counter_);
  records_ = true;
  step();
  records_ = false;
  calls_ = recorder.calls();
}

bool PlanRecorder::is_backward(std::size_t call) const {
  bool backward = false;
  for (const auto& [first, is_backward] : phases_) {
    backward = first <= static_cast<std::int64_t>(call) ? is_backward : backward;
  }
  return backward;
}

std::vector<PlannedCollective> PlanRecorder::of(std::size_t application) const {
  std::vector<PlannedCollective> list;
  for (const Span& span : spans_) {
    if (span.application != application) {
      continue;
    }
    for (auto i = static_cast<std::size_t>(span.first); i < static_cast<std::size_t>(span.last);
         ++i) {
      add_call(list, calls_[i], is_backward(i), span.reason);
    }
  }
  return list;
}

std::vector<PlannedCollective> PlanRecorder::elsewhere() const {
  std::vector<bool> caused(calls_.size());
  for (const Span& span : spans_) {
    std::fill(caused.begin() + span.first, caused.begin() + span.last, true);
  }
  std::vector<PlannedCollective> list;
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    if (!caused[i]) {
      const std::string& purpose = calls_[i].purpose;
      add_call(list, calls_[i], is_backward(i), purpose.empty() ? "of no operator" : purpose);
    }
  }
  return list;
}

}  // namespace tessera::tensor_parallel
