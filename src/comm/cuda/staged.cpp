// Collectives of CUDA tensors through a communicator for CPU tensors, for several ranks on one GPU.
// A collective waits for the current stream.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>
#include <vector>

#include "backends.h"

namespace tessera::comm {
namespace {

/// Returns an uninitialized CPU tensor like `tensor`. The memory is pinned if `tensor` is on a GPU,
/// so that a copy to the GPU is asynchronous.
at::Tensor host_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(),
                   tensor.options().device(at::kCPU).pinned_memory(tensor.is_cuda()));
}

/// Copies `tensor` to the CPU. Blocks until the copy is complete, because a collective on the CPU
/// reads the copy at once.
at::Tensor to_host(const at::Tensor& tensor) {
  at::Tensor host = host_like(tensor);
  host.copy_(tensor);
  return host;
}

std::vector<at::Tensor> for_all(const std::vector<at::Tensor>& tensors,
                                at::Tensor (*make)(const at::Tensor&)) {
  std::vector<at::Tensor> hosts;
  std::ranges::transform(tensors, std::back_inserter(hosts), make);
  return hosts;
}

class StagedWork final : public Work {
 public:
  StagedWork(WorkPtr work, std::vector<at::Tensor> hosts, std::vector<at::Tensor> devices)
      : work_(std::move(work)), hosts_(std::move(hosts)), devices_(std::move(devices)) {}

  void wait() override {
    if (work_ == nullptr) {
      return;
    }
    work_->wait();
    work_.reset();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    // The CPU tensors may be destroyed before these copies have run: the allocator of pinned memory
    // does not reuse their memory until the copies are complete.
    for (std::size_t i = 0; i < hosts_.size(); ++i) {
      devices_[i].copy_(hosts_[i], /*non_blocking=*/true);
    }
  }

 private:
  WorkPtr work_;
  std::vector<at::Tensor> hosts_;
  std::vector<at::Tensor> devices_;
};

class StagedCommunicator final : public Communicator {
 public:
  explicit StagedCommunicator(CommunicatorPtr host)
      : Communicator(host->rank(), host->size()), host_(std::move(host)) {}

  WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor result = host_like(output);
    return back(host_->all_gather(result, to_host(input)), result, output);
  }

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor result = to_host(tensor);
    return back(host_->all_reduce(result, op), result, tensor);
  }

  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor result = host_like(output);
    return back(host_->reduce_scatter(result, to_host(input), op), result, output);
  }

  WorkPtr all_gather_group(const std::vector<at::Tensor>& outputs,
                           const std::vector<at::Tensor>& inputs) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const std::vector<at::Tensor> results = for_all(outputs, host_like);
    return std::make_shared<StagedWork>(host_->all_gather_group(results, for_all(inputs, to_host)),
                                        results, outputs);
  }

  WorkPtr reduce_scatter_group(const std::vector<at::Tensor>& outputs,
                               const std::vector<at::Tensor>& inputs, ReduceOp op) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const std::vector<at::Tensor> results = for_all(outputs, host_like);
    return std::make_shared<StagedWork>(
        host_->reduce_scatter_group(results, for_all(inputs, to_host), op), results, outputs);
  }

  bool moves_groups_in_place() const override { return host_->moves_groups_in_place(); }

  WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input,
                     std::span<const std::int64_t> output_counts,
                     std::span<const std::int64_t> input_counts) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor result = host_like(output);
    return back(host_->all_to_all(result, to_host(input), output_counts, input_counts), result,
                output);
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor result = to_host(tensor);
    return back(host_->broadcast(result, root), result, tensor);
  }

  void set_purpose(std::string purpose) override { host_->set_purpose(std::move(purpose)); }
  bool compares_calls() const override { return host_->compares_calls(); }
  void barrier() override { host_->barrier(); }
  void any_rank(std::span<std::uint8_t> flags) override { host_->any_rank(flags); }
  void abort() override { host_->abort(); }
  void shutdown(std::chrono::milliseconds patience) override { host_->shutdown(patience); }
  std::string name() const override { return host_->name() + " (staged)"; }

 private:
  // Returns a Work whose wait() copies the CPU tensor `host`, the collective's result, to `device`.
  static WorkPtr back(WorkPtr work, at::Tensor host, at::Tensor device) {
    return std::make_shared<StagedWork>(std::move(work), std::vector{std::move(host)},
                                        std::vector{std::move(device)});
  }

  CommunicatorPtr host_;
};

}  // namespace

CommunicatorPtr make_staged_communicator(CommunicatorPtr host) {
  return std::make_shared<StagedCommunicator>(std::move(host));
}

}  // namespace tessera::comm
