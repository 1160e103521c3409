#include "loopback_communicator.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <numeric>

#include "done_work.h"

namespace tessera::comm {
namespace {

/// Both kinds of group without peers: one rank, or many that exist only on paper.
class LoopbackCommunicator final : public Communicator {
 public:
  LoopbackCommunicator(int rank, int size) : Communicator(rank, size) {}

  WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    output.view({size(), input.numel()}).copy_(input.view({1, input.numel()}));
    return done_work();
  }

  WorkPtr all_reduce(const at::Tensor&, ReduceOp) override { return done_work(); }

  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    output.view({-1}).copy_(input.view({-1}).narrow(0, rank() * output.numel(), output.numel()));
    return done_work();
  }

  WorkPtr all_gather_group(const std::vector<at::Tensor>& outputs,
                           const std::vector<at::Tensor>& inputs) override {
    for (std::size_t i = 0; i < inputs.size(); ++i) all_gather(outputs[i], inputs[i]);
    return done_work();
  }

  WorkPtr reduce_scatter_group(const std::vector<at::Tensor>& outputs,
                               const std::vector<at::Tensor>& inputs, ReduceOp op) override {
    for (std::size_t i = 0; i < inputs.size(); ++i) reduce_scatter(outputs[i], inputs[i], op);
    return done_work();
  }

  bool moves_groups_in_place() const override { return true; }
  bool compares_calls() const override { return true; }

  WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input,
                     std::span<const std::int64_t> output_counts,
                     std::span<const std::int64_t> input_counts) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto own = static_cast<std::size_t>(rank());
    const auto before = input_counts.first(own);
    const std::int64_t start = std::accumulate(before.begin(), before.end(), std::int64_t{0});
    std::int64_t at = 0;
    for (const std::int64_t count : output_counts) {
      const std::int64_t available = std::min(count, input_counts[own]);
      output.view({-1}).narrow(0, at, count).zero_();
      output.view({-1})
          .narrow(0, at, available)
          .copy_(input.view({-1}).narrow(0, start, available));
      at += count;
    }
    return done_work();
  }

  WorkPtr broadcast(const at::Tensor&, int) override { return done_work(); }
  void barrier() override {}
  std::string name() const override { return size() == 1 ? "solo" : "loopback"; }
};

}  // namespace

CommunicatorPtr make_solo_communicator() {
  return std::make_shared<LoopbackCommunicator>(0, 1);
}

CommunicatorPtr make_loopback_communicator(int rank, int size) {
  return std::make_shared<LoopbackCommunicator>(rank, size);
}

}  // namespace tessera::comm
