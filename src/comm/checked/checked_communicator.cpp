// CheckedCommunicator wraps every process group of a World. It checks arguments and counts
// collectives, so that the back ends need not do so.

#include <ATen/core/Tensor.h>
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "backends.h"
#include "checked/checked_communicator.h"
#include "group_info.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/core/detail/environment.h"
#include "tessera/core/error.h"
#include "watch/watch.h"

namespace tessera::comm {
namespace {

// Finds different collectives on different ranks, for back ends that do not compare calls. Ranks
// compare hashes of all calls. The stored texts are only for the message.

using Calls = std::vector<std::string>;

/// How many calls a CallHistory stores as text. The limit bounds the memory if the ranks never
/// compare their calls.
constexpr std::size_t kStoredCalls = 4096;

/// The collectives that a rank has called since the ranks last compared their calls.
class CallHistory {
 public:
  void add(std::string call) {
    // The hash includes a zero byte after each call, so that "ab", "c" differs from "a", "bc".
    hash_ = hash_of({call.c_str(), call.size() + 1}, hash_);
    if (calls_.size() < kStoredCalls) {
      calls_.push_back(call);
    }
    last_ = std::move(call);
  }

  /// Returns a hash of all calls, followed by the texts of the first kStoredCalls calls. A zero
  /// byte precedes each text.
  std::string text() const {
    std::string text = std::to_string(hash_);
    for (const std::string& call : calls_) {
      text += '\0' + call;
    }
    return text;
  }
  const std::string& last() const { return last_; }

 private:
  std::uint64_t hash_ = hash_of("");
  Calls calls_;
  std::string last_ = "no call";
};

Calls calls_of(const std::string& text) {
  Calls calls;
  std::istringstream parts(text);
  std::string part;
  std::getline(parts, part, '\0');
  while (std::getline(parts, part, '\0')) {
    calls.push_back(part);
  }
  return calls;
}

const std::string& call_at(const Calls& calls, std::size_t position) {
  static const std::string nothing = "nothing";
  return position < calls.size() ? calls[position] : nothing;
}

/// `calls`: the stored calls of each rank. Returns the first position at which the calls of two
/// ranks differ; kStoredCalls if there is none.
std::size_t first_difference_of(const std::vector<Calls>& calls) {
  std::size_t first = kStoredCalls;
  for (const Calls& others : calls) {
    const auto [a, b] = std::ranges::mismatch(calls.front(), others);
    if (a != calls.front().end() || b != others.end()) {
      first = std::min(first, static_cast<std::size_t>(b - others.begin()));
    }
  }
  return first;
}

std::string ranks_text(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? " on rank " : " on ranks ") + join(ranks);
}

/// Compares the call histories of all ranks of `group`. `ranks`: the group's world ranks. Returns a
/// description of the first difference; "" for none. Collective. Throws PeerError.
std::string first_difference(const CallHistory& history, Communicator& group,
                             const std::vector<int>& ranks) {
  std::vector<Calls> calls;
  for (const std::string& text : texts_that_differ(group, history.text())) {
    calls.push_back(calls_of(text));
  }
  if (calls.empty()) {
    return "";
  }
  const std::size_t position = first_difference_of(calls);
  if (position == kStoredCalls) {
    return detail::concat("the calls after the first ", kStoredCalls);
  }
  const std::string& here = call_at(calls[static_cast<std::size_t>(group.rank())], position);
  std::map<std::string, std::vector<int>> elsewhere;
  for (std::size_t rank = 0; rank < calls.size(); ++rank) {
    const std::string& there = call_at(calls[rank], position);
    if (there != here) {
      elsewhere[there].push_back(ranks[rank]);
    }
  }
  std::string text = detail::concat("call ", position + 1, " is ", here, " on this rank");
  for (const auto& [call, of] : elsewhere) {
    text += ", " + call + ranks_text(of);
  }
  return text;
}

std::int64_t input_bytes(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

std::int64_t input_bytes(const std::vector<at::Tensor>& tensors) {
  std::int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    bytes += input_bytes(tensor);
  }
  return bytes;
}

/// A Work that tells the GroupWatch when this thread begins to wait for a collective, and when the
/// collective is done.
class RecordedWork final : public Work {
 public:
  RecordedWork(WorkPtr inner, std::shared_ptr<GroupWatch> watch, const BegunCall& call)
      : inner_(std::move(inner)), watch_(std::move(watch)), call_(call) {}

  void wait() override {
    if (noted_) {
      inner_->wait();
      return;
    }
    noted_ = true;
    watch_->waits(call_);
    try {
      inner_->wait();
    } catch (...) {
      watch_->leaves(call_);
      throw;
    }
    watch_->leaves(call_);
    if (auto progress = inner_->device_progress()) {
      watch_->world().await_device(std::move(progress), call_);
    }
  }

  std::function<bool()> device_progress() override { return inner_->device_progress(); }

 private:
  WorkPtr inner_;
  std::shared_ptr<GroupWatch> watch_;
  BegunCall call_;
  bool noted_ = false;
};

/// Each method checks the arguments, counts and records the collective, and calls `inner_`. Invalid
/// calls are not counted or sent. With TESSERA_DEBUG, the ranks first compare their calls.
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
    return watched("all_gather", input_bytes(input), [&] {
      compare_purposes("all_gather", {input});
      return inner_->all_gather(output, input);
    });
  }

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    check_tensor("all_reduce", tensor, "tensor");
    check_op("all_reduce", tensor, op);
    return watched("all_reduce", input_bytes(tensor), [&] {
      compare_purposes("all_reduce", {tensor});
      return inner_->all_reduce(tensor, op);
    });
  }

  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override {
    check_pair("reduce_scatter", output, input);
    check_ratio("reduce_scatter", input, "input", output, "output");
    check_op("reduce_scatter", input, op);
    return watched("reduce_scatter", input_bytes(input), [&] {
      compare_purposes("reduce_scatter", {input});
      return inner_->reduce_scatter(output, input, op);
    });
  }

  WorkPtr all_gather_group(const std::vector<at::Tensor>& outputs,
                           const std::vector<at::Tensor>& inputs) override {
    check_group("all_gather", outputs, inputs);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      check_ratio("all_gather", outputs[i], "output", inputs[i], "input");
    }
    return watched("all_gather", input_bytes(inputs), [&] {
      compare_purposes("all_gather", inputs);
      return inner_->all_gather_group(outputs, inputs);
    });
  }

  WorkPtr reduce_scatter_group(const std::vector<at::Tensor>& outputs,
                               const std::vector<at::Tensor>& inputs, ReduceOp op) override {
    check_group("reduce_scatter", outputs, inputs);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      check_ratio("reduce_scatter", inputs[i], "input", outputs[i], "output");
    }
    check_op("reduce_scatter", inputs.front(), op);
    return watched("reduce_scatter", input_bytes(inputs), [&] {
      compare_purposes("reduce_scatter", inputs);
      return inner_->reduce_scatter_group(outputs, inputs, op);
    });
  }

  at::Tensor allocate(std::int64_t numel, const c10::TensorOptions& options) override {
    check_open("allocate");
    return inner_->allocate(numel, options);
  }

  bool moves_groups_in_place() const override { return inner_->moves_groups_in_place(); }
  bool averages_while_reducing() const override { return inner_->averages_while_reducing(); }
  bool compares_calls() const override { return inner_->compares_calls(); }
  bool keeps_order_on_device() const override { return inner_->keeps_order_on_device(); }
  bool takes_meta_tensors() const override { return inner_->takes_meta_tensors(); }
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
    return watched("all_to_all", input_bytes(input),
                   [&] { return inner_->all_to_all(output, input, output_counts, input_counts); });
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root) override {
    check_tensor("broadcast", tensor, "tensor");
    TESSERA_CHECK(root >= 0 && root < size(), describe(group_, "broadcast"), ": root ", root,
                  " is outside the group; pass a rank of the group, 0 to ", size() - 1);
    // Only the root of a broadcast sends bytes.
    return watched("broadcast", root == rank() ? input_bytes(tensor) : 0,
                   [&] { return inner_->broadcast(tensor, root); });
  }

  void barrier() override {
    check_open("barrier");
    remember("barrier");
    recorded("barrier", [&] {
      inner_->barrier();
      return done_work();
    });
  }
  void any_rank(std::span<std::uint8_t> flags) override {
    // Flags are in CPU memory, which NCCL does not accept, so the CPU group `hosts_` reduces them.
    if (hosts_ != nullptr) {
      check_open("any_rank");
      hosts_->get().any_rank(flags);
      return;
    }
    recorded("any_rank", [&] {
      inner_->any_rank(flags);
      return done_work();
    });
  }
  void abort() override {
    if (group_.watch != nullptr) {
      group_.watch->world().give_up();
    }
    if (hosts_ != nullptr) {
      hosts_->abort();  // before inner_->abort(), which can block
    }
    inner_->abort();
  }

  void shutdown(std::chrono::milliseconds patience) override {
    if (ended_.exchange(true)) {
      return;
    }
    if (!inner_->keeps_order_on_device()) {
      inner_->shutdown(patience);
      return;
    }
    // shutdown() waits for all ranks. shutdown() is recorded like a collective, so that the message
    // of a time-out can name the ranks that have not called shutdown().
    recorded("shutdown", [&] {
      inner_->shutdown(patience);
      return done_work();
    });
  }

  void agree_on_calls(const std::string& local_error) override {
    if (hosts_ == nullptr) {
      return;
    }
    check_open("agreement on the calls");
    if (!local_error.empty()) {
      history_.add("an error (" + local_error + ")");
    }
    // The history is emptied even if the comparison throws, because the process group stays usable.
    const CallHistory history = std::exchange(history_, {});
    std::string difference;
    const CallerScope caller("agree_on_calls");
    try {
      difference = first_difference(history, hosts_->get(), group_.ranks);
    } catch (const PeerError& error) {
      throw PeerError(detail::concat(describe(group_, "agreement on the calls"), ", after ",
                                     history.last(), ": ", error.what()));
    }
    TESSERA_CHECK(difference.empty(), describe(group_, "agreement on the calls"),
                  ": the ranks' calls since the last agreement differ: ", difference,
                  "; call the same collectives in the same order on all ranks");
  }

  std::string name() const override { return inner_->name(); }

 private:
  template <class Start>
  WorkPtr watched(const char* collective, std::int64_t bytes, Start&& start) {
    check_open(collective);
    if (size() > 1) {
      traffic_->record(group_.name, collective, bytes, purpose());
    }
    remember(collective);
    return recorded(collective, start);
  }

  template <class Start>
  WorkPtr recorded(const char* collective, Start&& start) {
    if (group_.watch == nullptr) {
      return start();
    }
    const BegunCall call = group_.watch->begin(collective, purpose());
    try {
      WorkPtr work = start();
      group_.watch->leaves(call);
      return work == done_work()
                 ? work
                 : std::make_shared<RecordedWork>(std::move(work), group_.watch, call);
    } catch (...) {
      group_.watch->leaves(call);
      throw;
    }
  }

  void check_open(const char* collective) const {
    TESSERA_CHECK(!ended_, describe(group_, with_purpose(collective, purpose()).c_str()),
                  kWorldHasEnded);
  }

  void remember(const char* collective) {
    // agree_on_calls() compares only collectives with a purpose text, such as "for unit 'a'".
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
                  ": the output is ", output.scalar_type(), " and the input is ",
                  input.scalar_type(), "; pass tensors of one type");
    TESSERA_CHECK(output.device() == input.device(), describe(group_, collective),
                  ": the output is on ", output.device(), " and the input on ", input.device(),
                  "; move both tensors to the device of the group");
  }

  void check_group(const char* collective, const std::vector<at::Tensor>& outputs,
                   const std::vector<at::Tensor>& inputs) const {
    TESSERA_CHECK(!inputs.empty() && outputs.size() == inputs.size(), describe(group_, collective),
                  ": ", outputs.size(), " outputs and ", inputs.size(),
                  " inputs were passed; pass one output for each input, and at least one input");
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      check_pair(collective, outputs[i], inputs[i]);
      TESSERA_CHECK(inputs[i].scalar_type() == inputs[0].scalar_type(),
                    describe(group_, collective), ": inputs of ", inputs[0].scalar_type(), " and ",
                    inputs[i].scalar_type(), " were passed; pass inputs of one type");
    }
  }

  void check_ratio(const char* collective, const at::Tensor& big, const char* big_name,
                   const at::Tensor& small, const char* small_name) const {
    TESSERA_CHECK(big.numel() == small.numel() * size(), describe(group_, collective), ": the ",
                  big_name, " has ", big.numel(), " elements, but needs ", size(), " times the ",
                  small.numel(), " elements of the ", small_name, ", which is ",
                  small.numel() * size());
  }

  void check_op(const char* collective, const at::Tensor& tensor, ReduceOp op) const {
    const bool floating = tensor.is_floating_point() || tensor.is_complex();
    TESSERA_CHECK(floating || op != ReduceOp::kAvg, describe(group_, collective), ": avg of ",
                  tensor.scalar_type(),
                  " would be rounded; reduce with sum, or convert to a float type");
    TESSERA_CHECK(tensor.scalar_type() != at::kBool || op != ReduceOp::kSum,
                  describe(group_, collective),
                  ": sum of Bool is not defined; reduce with max (any), min (all) or convert");
    TESSERA_CHECK(!tensor.is_complex() || (op != ReduceOp::kMax && op != ReduceOp::kMin),
                  describe(group_, collective), ": ", to_string(op),
                  " of complex numbers is not defined; reduce with sum");
  }

  void check_counts(const at::Tensor& tensor, std::span<const std::int64_t> counts,
                    const char* which) const {
    const bool right_length = static_cast<int>(counts.size()) == size();
    const bool negative = std::ranges::any_of(counts, [](std::int64_t count) { return count < 0; });
    const auto sum = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
    TESSERA_CHECK(right_length && !negative && sum == tensor.numel(),
                  describe(group_, "all_to_all"), ": the ", counts.size(), " counts of the ", which,
                  " sum to ", sum, ", but there are ", size(), " ranks and ", tensor.numel(),
                  " elements; pass one count >= 0 for each rank; the sum must be ", tensor.numel());
  }

  /// With TESSERA_DEBUG, throws Error if the ranks' calls differ in purpose ("for unit 'a'"), dtype
  /// or size in bytes. The check is an uncounted collective.
  void compare_purposes(const char* collective, const std::vector<at::Tensor>& inputs) {
    // The comparison is not counted as traffic, because `inner_` is called directly.
    if (!compares_purposes_ || purpose().empty() || size() == 1 || inner_->compares_calls()) {
      return;
    }
    const std::string own =
        detail::concat(with_purpose(collective, purpose()), " (", input_bytes(inputs), " bytes of ",
                       inputs.front().scalar_type(), ")");
    const std::vector<std::string> all = gather_texts(*inner_, inputs.front().device(), own);
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      TESSERA_CHECK(all[rank] == own, describe(group_, collective), ": this rank calls ", own,
                    ", but rank ", group_.ranks[rank], " calls ", all[rank],
                    "; call the same collectives in the same order on all ranks");
    }
  }

  CommunicatorPtr inner_;
  GroupInfo group_;
  TrafficCounterPtr traffic_;
  // The CPU group that compares calls; nullptr if the back end compares each call itself.
  std::unique_ptr<LazyHostGroup> hosts_;
  bool compares_purposes_ = detail::debug_checks();
  /// Whether shutdown() was called. Atomic, because another thread can use the process group.
  std::atomic<bool> ended_ = false;
  // The calls since the last agree_on_calls(); recorded only if `hosts_` is not nullptr.
  CallHistory history_;
};

}  // namespace

Communicator& LazyHostGroup::get() {
  if (failed_) {
    throw PeerError(
        "the group that compares the ranks' calls failed earlier; look for the first "
        "error");
  }
  if (made_ == nullptr) {
    // The lock is not held while make_() runs, because make_() can take as long as the time-out,
    // and abort() must not wait for the lock for so long.
    CommunicatorPtr made;
    try {
      made = make_();
    } catch (const PeerError&) {
      failed_ = true;
      throw;
    }
    const std::lock_guard lock(mutex_);
    made_ = std::move(made);
    if (failed_) {  // abort() was called while make_() ran
      made_->abort();
    }
  }
  return *made_;
}

void LazyHostGroup::abort() {
  failed_ = true;
  const std::lock_guard lock(mutex_);
  if (made_ != nullptr) {
    made_->abort();
  }
}

CommunicatorPtr make_checked_communicator(CommunicatorPtr inner, GroupInfo group,
                                          TrafficCounterPtr traffic,
                                          std::unique_ptr<LazyHostGroup> hosts) {
  return std::make_shared<CheckedCommunicator>(std::move(inner), std::move(group),
                                               std::move(traffic), std::move(hosts));
}

}  // namespace tessera::comm
