// Collectives without other ranks, for a process group of one rank and for fake_world(). Result
// sizes and traffic counts are those of a real process group.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "backends.h"
#include "tessera/internals/detail/dispatch_keys.h"

namespace tessera::comm {
namespace {

/// A process group of one rank, or a larger process group of which only this rank exists.
class LoopbackCommunicator final : public Communicator {
 public:
  LoopbackCommunicator(GroupInfo group, FakeStart start)
      : Communicator(group.rank, group.size()),
        group_(std::move(group)),
        start_(std::move(start)) {}

  WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
    return all_gather_group({output}, {input});
  }

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp) override {
    return started("all_reduce", {tensor});
  }

  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override {
    return reduce_scatter_group({output}, {input}, op);
  }

  WorkPtr all_gather_group(const std::vector<at::Tensor>& outputs,
                           const std::vector<at::Tensor>& inputs) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (has_values(inputs[i])) {
        outputs[i].view({size(), -1}).copy_(inputs[i].view({1, -1}));
      }
    }
    return started("all_gather", inputs);
  }

  WorkPtr reduce_scatter_group(const std::vector<at::Tensor>& outputs,
                               const std::vector<at::Tensor>& inputs, ReduceOp) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (has_values(inputs[i])) {
        const std::int64_t rows = outputs[i].numel();
        outputs[i].view({-1}).copy_(inputs[i].view({-1}).narrow(0, rank() * rows, rows));
      }
    }
    return started("reduce_scatter", inputs);
  }

  // In a FakeMode (planning), this process group stands for an NCCL group, which computes averages
  // during a reduction at no extra cost.
  bool averages_while_reducing() const override {
    return size() > 1 && detail::is_included(detail::kFakeModeKey);
  }
  // Without other ranks, tensors need no packing and calls need no comparison.
  bool moves_groups_in_place() const override { return true; }
  bool compares_calls() const override { return true; }

  // Every other rank is assumed to send the data that this rank sends to itself. If the output
  // expects more elements from a rank, the missing elements are zero.
  WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input,
                     std::span<const std::int64_t> output_counts,
                     std::span<const std::int64_t> input_counts) override {
    if (!has_values(input)) {
      return started("all_to_all", {input});
    }
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
    return started("all_to_all", {input});
  }

  WorkPtr broadcast(const at::Tensor& tensor, int) override {
    return started("broadcast", {tensor});
  }
  bool takes_meta_tensors() const override { return size() > 1; }
  void barrier() override {}
  std::string name() const override { return size() == 1 ? "solo" : "loopback"; }

 private:
  /// Whether collectives copy this rank's data to the other ranks' parts of outputs. False for
  /// floating-point tensors in a FakeMode, because such tensors have no values.
  bool has_values(const at::Tensor& tensor) const {
    return size() == 1 || !detail::is_included(detail::kFakeModeKey) ||
           !(tensor.is_floating_point() || tensor.is_complex());
  }

  WorkPtr started(const char* collective, const std::vector<at::Tensor>& inputs) const {
    if (!start_ || size() == 1) {
      return done_work();
    }
    std::int64_t bytes = 0;
    for (const at::Tensor& input : inputs) {
      bytes += static_cast<std::int64_t>(input.nbytes());
    }
    WorkPtr work = start_({group_.name, group_.ranks, collective, bytes});
    return work != nullptr ? work : done_work();
  }

  GroupInfo group_;
  FakeStart start_;
};

}  // namespace

CommunicatorPtr make_loopback_communicator(GroupInfo group, FakeStart start) {
  return std::make_shared<LoopbackCommunicator>(std::move(group), std::move(start));
}

}  // namespace tessera::comm
