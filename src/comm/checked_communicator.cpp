#include "checked_communicator.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <numeric>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

class CheckedCommunicator final : public Communicator {
 public:
  CheckedCommunicator(CommunicatorPtr inner, GroupInfo group, TrafficCounterPtr traffic)
      : Communicator(inner->rank(), inner->size()),
        inner_(std::move(inner)),
        group_(std::move(group)),
        traffic_(std::move(traffic)) {}

  WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
    check_pair("all_gather", output, input);
    check_ratio("all_gather", output, "output", input, "input");
    count("all_gather", bytes_of(input));
    return inner_->all_gather(output, input);
  }

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    check_tensor("all_reduce", tensor, "tensor");
    check_op("all_reduce", tensor, op);
    count("all_reduce", bytes_of(tensor));
    return inner_->all_reduce(tensor, op);
  }

  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override {
    check_pair("reduce_scatter", output, input);
    check_ratio("reduce_scatter", input, "input", output, "output");
    check_op("reduce_scatter", input, op);
    count("reduce_scatter", bytes_of(input));
    return inner_->reduce_scatter(output, input, op);
  }

  WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input,
                     std::span<const std::int64_t> output_counts,
                     std::span<const std::int64_t> input_counts) override {
    check_pair("all_to_all", output, input);
    check_counts(output, output_counts, "output");
    check_counts(input, input_counts, "input");
    count("all_to_all", bytes_of(input));
    return inner_->all_to_all(output, input, output_counts, input_counts);
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root) override {
    check_tensor("broadcast", tensor, "tensor");
    TESSERA_CHECK(root >= 0 && root < size(), describe(group_, "broadcast"), ": root ", root,
                  " is outside the group; pass a rank of the group, 0 to ", size() - 1);
    count("broadcast", root == rank() ? bytes_of(tensor) : 0);
    return inner_->broadcast(tensor, root);
  }

  void barrier() override { inner_->barrier(); }
  void abort() override { inner_->abort(); }
  std::string name() const override { return inner_->name(); }

 private:
  void count(const char* collective, std::int64_t bytes) {
    if (size() > 1) {
      traffic_->record(group_.name, collective, bytes);
    }
  }

  void check_tensor(const char* collective, const at::Tensor& tensor, const char* which) const {
    TESSERA_CHECK(tensor.defined(), describe(group_, collective), ": the ", which,
                  " is undefined; pass an allocated tensor");
    TESSERA_CHECK(tensor.is_contiguous(), describe(group_, collective), ": the ", which,
                  " is not contiguous; pass tensor.contiguous()");
  }

  void check_pair(const char* collective, const at::Tensor& output, const at::Tensor& input) const {
    check_tensor(collective, output, "output");
    check_tensor(collective, input, "input");
    TESSERA_CHECK(output.scalar_type() == input.scalar_type(), describe(group_, collective),
                  ": the output is ", output.scalar_type(), ", the input ", input.scalar_type(),
                  "; give both one type");
    TESSERA_CHECK(output.device() == input.device(), describe(group_, collective),
                  ": the output is on ", output.device(), ", the input on ", input.device(),
                  "; put both on the group's device");
  }

  void check_ratio(const char* collective, const at::Tensor& big, const char* big_name,
                   const at::Tensor& small, const char* small_name) const {
    TESSERA_CHECK(big.numel() == small.numel() * size(), describe(group_, collective), ": the ",
                  big_name, " has ", big.numel(), " elements, which is not ", size(), " times the ",
                  small.numel(), " of the ", small_name, "; allocate ", small.numel() * size());
  }

  void check_op(const char* collective, const at::Tensor& tensor, ReduceOp op) const {
    const bool floating = tensor.is_floating_point() || tensor.is_complex();
    TESSERA_CHECK(floating || op != ReduceOp::kAvg, describe(group_, collective), ": avg of ",
                  tensor.scalar_type(),
                  " would round; reduce with sum, or convert to a float type");
    TESSERA_CHECK(tensor.scalar_type() != at::kBool || op != ReduceOp::kSum,
                  describe(group_, collective),
                  ": sum of Bool has no meaning; reduce with max (any), min (all) or convert");
    TESSERA_CHECK(!tensor.is_complex() || (op != ReduceOp::kMax && op != ReduceOp::kMin),
                  describe(group_, collective), ": ", to_string(op),
                  " of complex numbers has no meaning; reduce with sum");
  }

  void check_counts(const at::Tensor& tensor, std::span<const std::int64_t> counts,
                    const char* which) const {
    const bool right_length = static_cast<int>(counts.size()) == size();
    const bool negative = std::ranges::any_of(counts, [](std::int64_t count) { return count < 0; });
    const auto sum = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
    TESSERA_CHECK(right_length && !negative && sum == tensor.numel(),
                  describe(group_, "all_to_all"), ": the ", which, " counts (", counts.size(),
                  " of them, sum ", sum, ") do not fit ", size(), " ranks and ", tensor.numel(),
                  " elements; give one count >= 0 per rank that sum to the elements");
  }

  CommunicatorPtr inner_;
  GroupInfo group_;
  TrafficCounterPtr traffic_;
};

}  // namespace

CommunicatorPtr make_checked_communicator(CommunicatorPtr inner, GroupInfo group,
                                          TrafficCounterPtr traffic) {
  return std::make_shared<CheckedCommunicator>(std::move(inner), std::move(group),
                                               std::move(traffic));
}

}  // namespace tessera::comm
