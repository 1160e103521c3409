#include "communication.h"

#include <utility>

#include "parameter_group.h"

namespace tessera::fsdp {

using comm::Lane;

void Communication::reduce(std::vector<ParameterGroup>& groups) {
  finish_reductions();
  free_retired();
  for (ParameterGroup& group : groups) {
    group.start_reduce(*this);
    reducing_.push_back(&group);
  }
}

void Communication::finish_reductions() {
  if (!reducing_.empty()) {
    join_hooks();
  }
  for (ParameterGroup* group : std::exchange(reducing_, {})) {
    group->finish_reduce(*this);
  }
}

void Communication::settle() {
  finish_reductions();
  join_hooks();
  streams_->order(Lane::kReduceScatter, Lane::kCompute);
  sums_.run();
  free_retired();
  pool_.clear();
  if (std::exchange(host_reads_, false)) {
    streams_->synchronize(streams_->record(Lane::kCompute));
  }
}

void Communication::forget(std::vector<ParameterGroup>& groups) {
  for (ParameterGroup& group : groups) {
    std::erase(reducing_, &group);
    group.forget_reduction(*this);
  }
}

void Communication::retire(std::vector<at::Tensor> tensors, comm::StreamEventPtr event) {
  if (event != nullptr && !tensors.empty()) {
    retired_.push_back({std::move(tensors), std::move(event)});
  }
}

void Communication::await_hook(std::vector<at::Tensor> tensors, Lane owner,
                               comm::StreamEventPtr event) {
  if (event != nullptr) {
    hooked_.push_back({std::move(tensors), owner, std::move(event)});
  }
}

void Communication::join_hooks() {
  for (const Hooked& hooked : std::exchange(hooked_, {})) {
    streams_->wait(hooked.owner, hooked.event);
  }
}

void Communication::free_retired() {
  for (const Retired& retired : std::exchange(retired_, {})) {
    streams_->wait(Lane::kCompute, retired.event);
  }
}

}  // namespace tessera::fsdp
