// The communication that the units of a model have under way together. Two rules bound the memory
// of a step: at most one unit's gradients are being reduced at a time, and a tensor that another
// lane reads is kept until compute has waited for that lane.

#include "parameter_group/comm_context.h"

#include <utility>

#include "parameter_group/parameter_group.h"

namespace tessera::fsdp {

using comm::Lane;

/// One unit at a time: gradients that wait to be reduced are the largest part of a step's memory.
void CommContext::reduce(std::vector<ParameterGroup>& groups) {
  finish_reductions();
  free_retired();
  // Memory that no gather has taken since would add to the gradients.
  pool_.drop(Lane::kAllGather);
  for (ParameterGroup& group : groups) {
    group.gradients().start_reduce(*this);
    // After start_reduce, so that a reduction that could not start is not waited for.
    reducing_.push_back(&group.gradients());
  }
}

void CommContext::finish_reductions() {
  // Results that a hook still reads are freed here, after their lane has waited for it.
  if (!reducing_.empty()) {
    join_hooks();
  }
  // Exchanged first: if one throws, the rest is not finished a second time.
  for (GradientState* gradients : std::exchange(reducing_, {})) {
    gradients->finish_reduce(*this);
  }
}

void CommContext::settle() {
  finish_reductions();
  join_hooks();
  // The optimizer runs in the compute lane.
  streams_->order(Lane::kReduceScatter, Lane::kCompute);
  // In the compute lane, which has just been ordered behind the reductions: the terms are views of
  // their results.
  sums_.run();
  free_retired();
  pool_.clear();
  const auto on_host = std::exchange(on_host_, {});
  if (!on_host.empty()) {
    // The host reads offloaded gradients (an optimizer on the CPU): an order of lanes is not
    // enough.
    streams_->synchronize(streams_->record(Lane::kCompute));
  }
  for (ShardedParameter* parameter : on_host) {
    parameter->arrive();
  }
}

void CommContext::forget(std::vector<ParameterGroup>& groups) {
  for (ParameterGroup& group : groups) {
    // Only these groups': other units that share the context continue.
    std::erase(reducing_, &group.gradients());
    for (const ShardedParameter& parameter : group.parameters()) {
      std::erase(on_host_, &parameter);
    }
    group.gradients().forget_reduction(*this);
  }
}

/// Without an event (on a CPU) no other lane uses them: they are freed at once.
void CommContext::retire(std::vector<at::Tensor> tensors, comm::StreamEventPtr event) {
  if (event != nullptr && !tensors.empty()) {
    retired_.push_back({std::move(tensors), std::move(event)});
  }
}

void CommContext::await_hook(std::vector<at::Tensor> tensors, Lane owner,
                             comm::StreamEventPtr event) {
  if (event != nullptr) {
    hooked_.push_back({std::move(tensors), owner, std::move(event)});
  }
}

void CommContext::join_hooks() {
  for (const Hooked& hooked : std::exchange(hooked_, {})) {
    streams_->wait(hooked.owner, hooked.event);
  }
}

void CommContext::free_retired() {
  for (const Retired& retired : std::exchange(retired_, {})) {
    streams_->wait(Lane::kCompute, retired.event);
  }
}

}  // namespace tessera::fsdp
