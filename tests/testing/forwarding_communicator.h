#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/comm/world.h"

namespace tessera::testing {

/// Forwards every call to another communicator. Derived classes override functions to record calls
/// or to make calls fail.
class ForwardingCommunicator : public comm::Communicator {
 public:
  explicit ForwardingCommunicator(comm::CommunicatorPtr inner)
      : Communicator(inner->rank(), inner->size()), inner_(std::move(inner)) {}

  comm::WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
    return inner_->all_gather(output, input);
  }
  comm::WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    return inner_->all_reduce(tensor, op);
  }
  comm::WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                               ReduceOp op) override {
    return inner_->reduce_scatter(output, input, op);
  }
  comm::WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input,
                           std::span<const std::int64_t> output_counts,
                           std::span<const std::int64_t> input_counts) override {
    return inner_->all_to_all(output, input, output_counts, input_counts);
  }
  comm::WorkPtr broadcast(const at::Tensor& tensor, int root) override {
    return inner_->broadcast(tensor, root);
  }
  comm::WorkPtr all_gather_group(const std::vector<at::Tensor>& outputs,
                                 const std::vector<at::Tensor>& inputs) override {
    return inner_->all_gather_group(outputs, inputs);
  }
  comm::WorkPtr reduce_scatter_group(const std::vector<at::Tensor>& outputs,
                                     const std::vector<at::Tensor>& inputs, ReduceOp op) override {
    return inner_->reduce_scatter_group(outputs, inputs, op);
  }
  at::Tensor allocate(std::int64_t numel, const c10::TensorOptions& options) override {
    return inner_->allocate(numel, options);
  }
  bool moves_groups_in_place() const override { return inner_->moves_groups_in_place(); }
  bool averages_while_reducing() const override { return inner_->averages_while_reducing(); }
  void barrier() override { inner_->barrier(); }
  void any_rank(std::span<std::uint8_t> flags) override { inner_->any_rank(flags); }
  void set_purpose(std::string purpose) override {
    Communicator::set_purpose(purpose);
    inner_->set_purpose(std::move(purpose));
  }
  bool compares_calls() const override { return inner_->compares_calls(); }
  void agree_on_calls(const std::string& trouble) override { inner_->agree_on_calls(trouble); }
  void abort() override { inner_->abort(); }
  std::string name() const override { return inner_->name(); }
  bool keeps_order_on_device() const override { return inner_->keeps_order_on_device(); }
  bool takes_meta_tensors() const override { return inner_->takes_meta_tensors(); }
  void shutdown(std::chrono::milliseconds patience) override { inner_->shutdown(patience); }

 protected:
  comm::Communicator& inner() const { return *inner_; }

 private:
  comm::CommunicatorPtr inner_;
};

/// Replaces the process groups of a world, and of its meshes, by wrappers. Only one thread may use
/// a WrappedWorld at a time.
class WrappedWorld final : public comm::World {
 public:
  /// Returns the wrapper for a process group.
  using Wrap =
      std::function<comm::CommunicatorPtr(comm::CommunicatorPtr group, const std::string& name)>;

  WrappedWorld(comm::WorldPtr inner, Wrap wrap)
      : inner_(std::move(inner)), wrap_(std::move(wrap)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  int local_rank() const override { return inner_->local_rank(); }
  const comm::WorldOptions& options() const override { return inner_->options(); }
  comm::TrafficCounter& traffic() override { return inner_->traffic(); }
  comm::CommunicatorPtr group(const std::vector<int>& ranks, const std::string& name) override {
    comm::CommunicatorPtr& known = groups_[{ranks, name}];
    if (known == nullptr) {
      known = wrap_(inner_->group(ranks, name), name);
    }
    return known;
  }
  void abort() override { inner_->abort(); }
  int device_index() const override { return inner_->device_index(); }
  void shutdown() override { inner_->shutdown(); }

 private:
  comm::WorldPtr inner_;
  Wrap wrap_;
  std::map<std::pair<std::vector<int>, std::string>, comm::CommunicatorPtr> groups_;
};

}  // namespace tessera::testing
