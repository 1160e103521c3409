#include "checked_communicator.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string_view>

#include "call_history.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

std::int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  std::int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    bytes += bytes_of(tensor);
  }
  return bytes;
}

bool debugging() {
  static const bool on = [] {
    const char* value = std::getenv("TESSERA_DEBUG");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return on;
}

/// Room for a purpose, on the device of `like`.
at::Tensor text_tensor(const std::string& text, std::int64_t length, const at::Tensor& like) {
  at::Tensor bytes = at::zeros({length}, at::kByte);
  std::copy_n(text.begin(), std::min<std::size_t>(text.size(), static_cast<std::size_t>(length)),
              bytes.data_ptr<std::uint8_t>());
  return bytes.to(like.device());
}

std::string text_of(const at::Tensor& bytes) {
  const at::Tensor host = bytes.cpu().contiguous();
  const auto* first = reinterpret_cast<const char*>(host.const_data_ptr<std::uint8_t>());
  return {first, strnlen(first, static_cast<std::size_t>(host.numel()))};
}

class CheckedCommunicator final : public Communicator {
 public:
  CheckedCommunicator(CommunicatorPtr inner, GroupInfo group, TrafficCounterPtr traffic,
                      std::unique_ptr<LazyHostGroup> hosts)
      : Communicator(inner->rank(), inner->size()),
        inner_(std::move(inner)),
        group_(std::move(group)),
        traffic_(std::move(traffic)),
        hosts_(std::move(hosts)) {}

  WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
    check_pair("all_gather", output, input);
    check_ratio("all_gather", output, "output", input, "input");
    count("all_gather", bytes_of(input));
    compare_purposes("all_gather", input);
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
    compare_purposes("reduce_scatter", input);
    return inner_->reduce_scatter(output, input, op);
  }

  WorkPtr all_gather_group(const std::vector<at::Tensor>& outputs,
                           const std::vector<at::Tensor>& inputs) override {
    check_group("all_gather", outputs, inputs);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      check_ratio("all_gather", outputs[i], "output", inputs[i], "input");
    }
    count("all_gather", bytes_of(inputs));
    compare_purposes("all_gather", inputs.front());
    return inner_->all_gather_group(outputs, inputs);
  }

  WorkPtr reduce_scatter_group(const std::vector<at::Tensor>& outputs,
                               const std::vector<at::Tensor>& inputs, ReduceOp op) override {
    check_group("reduce_scatter", outputs, inputs);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      check_ratio("reduce_scatter", inputs[i], "input", outputs[i], "output");
    }
    check_op("reduce_scatter", inputs.front(), op);
    count("reduce_scatter", bytes_of(inputs));
    compare_purposes("reduce_scatter", inputs.front());
    return inner_->reduce_scatter_group(outputs, inputs, op);
  }

  at::Tensor allocate(std::int64_t numel, const c10::TensorOptions& options) override {
    return inner_->allocate(numel, options);
  }

  bool moves_groups_in_place() const override { return inner_->moves_groups_in_place(); }
  bool compares_calls() const override { return inner_->compares_calls(); }
  void set_purpose(std::string purpose) override {
    Communicator::set_purpose(purpose);
    inner_->set_purpose(std::move(purpose));
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

  void barrier() override {
    remember("barrier");
    inner_->barrier();
  }
  void any_rank(std::span<std::uint8_t> flags) override {
    (hosts_ != nullptr ? hosts_->get() : *inner_).any_rank(flags);
  }
  void abort() override {
    if (hosts_ != nullptr) {
      hosts_->abort();  // first: it takes no time
    }
    inner_->abort();
  }

  void agree_on_calls(const std::string& trouble) override {
    if (hosts_ == nullptr) {
      return;
    }
    if (!trouble.empty()) {
      history_.add("an error (" + trouble + ")");
    }
    const CallHistory history = std::exchange(history_, {});
    std::string difference;
    try {
      difference = first_difference(history, hosts_->get(), group_.ranks);
    } catch (const PeerError& error) {
      throw PeerError(detail::concat(describe(group_, "agreement on the calls"), ", after ",
                                     history.last(), ": ", error.what()));
    }
    TESSERA_CHECK(difference.empty(), describe(group_, "agreement on the calls"),
                  ": the ranks' calls since the last agreement differ: ", difference,
                  "; make the ranks issue the same collectives in the same order");
  }

  std::string name() const override { return inner_->name(); }

 private:
  /// Of a call that is about to be made.
  void count(const char* collective, std::int64_t bytes) {
    if (size() > 1) {
      traffic_->record(group_.name, collective, bytes, purpose());
    }
    remember(collective);
  }

  void remember(const char* collective) {
    if (hosts_ != nullptr && !purpose().empty()) {
      history_.add(with_purpose(collective, purpose()));
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

  void check_group(const char* collective, const std::vector<at::Tensor>& outputs,
                   const std::vector<at::Tensor>& inputs) const {
    TESSERA_CHECK(!inputs.empty() && outputs.size() == inputs.size(), describe(group_, collective),
                  ": a group of ", outputs.size(), " outputs and ", inputs.size(),
                  " inputs; give one output for each input, and at least one");
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      check_pair(collective, outputs[i], inputs[i]);
      TESSERA_CHECK(inputs[i].scalar_type() == inputs[0].scalar_type(),
                    describe(group_, collective), ": a group of ", inputs[0].scalar_type(), " and ",
                    inputs[i].scalar_type(), "; give all tensors of a group one type");
    }
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

  /// For back ends that would move one rank's bytes to another's unrelated place.
  void compare_purposes(const char* collective, const at::Tensor& like) {
    if (!debugging() || purpose().empty() || size() == 1 || inner_->compares_calls()) {
      return;
    }
    constexpr std::int64_t kLength = 96;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor own =
        text_tensor(detail::concat(collective, " for ", purpose()), kLength, like);
    const at::Tensor all = at::empty({size(), kLength}, own.options());
    inner_->all_gather(all, own)->wait();
    for (int rank = 0; rank < size(); ++rank) {
      const std::string theirs = text_of(all.select(0, rank));
      TESSERA_CHECK(theirs == text_of(own), describe(group_, collective), ": this rank calls ",
                    text_of(own), ", rank ", group_.ranks[static_cast<std::size_t>(rank)],
                    " calls ", theirs, "; make the ranks issue the same collectives in order");
    }
  }

  CommunicatorPtr inner_;
  GroupInfo group_;
  TrafficCounterPtr traffic_;
  std::unique_ptr<LazyHostGroup> hosts_;
  CallHistory history_;
};

}  // namespace

CommunicatorPtr make_checked_communicator(CommunicatorPtr inner, GroupInfo group,
                                          TrafficCounterPtr traffic,
                                          std::unique_ptr<LazyHostGroup> hosts) {
  return std::make_shared<CheckedCommunicator>(std::move(inner), std::move(group),
                                               std::move(traffic), std::move(hosts));
}

}  // namespace tessera::comm
