#include "staged_communicator.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace tessera::comm {
namespace {

at::Tensor host_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true));
}

at::Tensor to_host(const at::Tensor& tensor) {
  at::Tensor host = host_like(tensor);
  host.copy_(tensor);
  return host;
}

class StagedWork final : public Work {
 public:
  StagedWork(WorkPtr work, at::Tensor host, at::Tensor device)
      : work_(std::move(work)), host_(std::move(host)), device_(std::move(device)) {}

  void wait() override {
    if (work_ == nullptr) {
      return;
    }
    work_->wait();
    work_.reset();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    device_.copy_(host_, /*non_blocking=*/true);
  }

 private:
  WorkPtr work_;
  at::Tensor host_;
  at::Tensor device_;
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
  std::string name() const override { return host_->name() + " (staged)"; }

 private:
  static WorkPtr back(WorkPtr work, at::Tensor host, at::Tensor device) {
    return std::make_shared<StagedWork>(std::move(work), std::move(host), std::move(device));
  }

  CommunicatorPtr host_;
};

}  // namespace

CommunicatorPtr make_staged_communicator(CommunicatorPtr host) {
  return std::make_shared<StagedCommunicator>(std::move(host));
}

}  // namespace tessera::comm
