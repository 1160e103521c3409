#include "gloo_communicator.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <atomic>
#include <functional>

#include "c10d_arguments.h"
#include "done_work.h"
#include "local_reduce.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr auto kAbortKey = "abort";
constexpr milliseconds kAbortPoll{200};

/// The types whose reduction libtorch's Gloo implements.
bool gloo_reduces(at::ScalarType type, ReduceOp op) {
  switch (type) {
    case at::kFloat:
    case at::kDouble:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return true;
    case at::kHalf:
    case at::kBFloat16:
      // Gloo rounds after every term; the sum and the product are ours, in fp32.
      return op == ReduceOp::kMax || op == ReduceOp::kMin;
    default:
      return false;
  }
}

/// The process group with what outlives a failure of it. Shared by the communicator and its works.
class GlooGroup {
 public:
  GlooGroup(c10::intrusive_ptr<c10d::Store> store, GroupInfo group, const std::string& address)
      : store_(std::move(store)), group_(std::move(group)) {
    auto options = c10d::ProcessGroupGloo::Options::create(group_.timeout);
    options->devices = {c10d::ProcessGroupGloo::createDeviceForHostname(address)};
    process_group_ =
        c10::make_intrusive<c10d::ProcessGroupGloo>(store_, group_.rank, group_.size(), options);
  }

  GlooGroup(const GlooGroup&) = delete;
  GlooGroup& operator=(const GlooGroup&) = delete;

  ~GlooGroup() {
    // After a failure an operation may still be stuck in Gloo's thread until the time-out, and the
    // destructor would wait for it: such a group is left to the end of the process.
    if (failed_) {
      process_group_.release();
    }
  }

  const GroupInfo& info() const { return group_; }

  /// Starts an operation.
  template <class Start>
  c10::intrusive_ptr<c10d::Work> start(const char* collective, Start&& start) {
    if (failed_) {
      throw PeerError(describe(group_, collective) +
                      ": the group failed earlier; end this rank and start the job again");
    }
    try {
      return start(*process_group_);
    } catch (const std::exception& error) {
      give_up(collective, error.what());
    }
  }

  /// Waits for its end; notices a peer that gave up.
  void wait(c10d::Work& work, const char* collective) {
    try {
      const auto deadline = steady_clock::now() + group_.timeout;
      while (!wait_a_little(work, kAbortPoll)) {
        check_peers(collective);
        TESSERA_CHECK(steady_clock::now() < deadline, "a peer did not come within ",
                      group_.timeout.count(), " ms");
      }
    } catch (const std::exception& error) {
      give_up(collective, error.what());
    }
  }

  void abort() {
    failed_ = true;
    try {
      store_->set(kAbortKey, std::to_string(group_.ranks[static_cast<std::size_t>(group_.rank)]));
    } catch (const std::exception&) {
      // The store's host is gone, and with it the job: the peers notice by themselves.
    }
  }

 private:
  /// False: not done yet. Throws what the operation threw.
  static bool wait_a_little(c10d::Work& work, milliseconds duration) {
    try {
      work.wait(duration);
      return true;
    } catch (const std::exception&) {
      if (work.isCompleted()) {
        throw;
      }
      return false;
    }
  }

  void check_peers(const char* collective) {
    if (store_->check({kAbortKey})) {
      fail("rank ", store_->get_to_str(kAbortKey), " failed elsewhere while this rank waited in ",
           collective);
    }
  }

  [[noreturn]] void give_up(const char* collective, const std::string& reason) {
    failed_ = true;
    throw PeerError(describe(group_, collective) + ": " + first_line(reason) +
                    "; look for the first error among the other ranks");
  }

  c10::intrusive_ptr<c10d::Store> store_;
  GroupInfo group_;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> process_group_;
  std::atomic<bool> failed_{false};
};
using GlooGroupPtr = std::shared_ptr<GlooGroup>;

/// An operation under way and what is left to do on its results.
class GlooWork final : public Work {
 public:
  GlooWork(GlooGroupPtr group, std::string collective, c10::intrusive_ptr<c10d::Work> work,
           std::function<void()> finish = nullptr)
      : group_(std::move(group)),
        collective_(std::move(collective)),
        work_(std::move(work)),
        finish_(std::move(finish)) {}

  void wait() override {
    if (work_ == nullptr) {
      return;
    }
    group_->wait(*work_, collective_.c_str());
    work_.reset();
    if (finish_) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      finish_();
      finish_ = nullptr;
    }
  }

 private:
  GlooGroupPtr group_;
  std::string collective_;
  c10::intrusive_ptr<c10d::Work> work_;
  std::function<void()> finish_;
};

class GlooCommunicator final : public Communicator {
 public:
  explicit GlooCommunicator(GlooGroupPtr group)
      : Communicator(group->info().rank, group->info().size()), group_(std::move(group)) {}

  // An empty all-gather, all-reduce and reduce-scatter is empty on every rank: nothing to send.
  WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
    return input.numel() == 0 ? done_work() : gather("all_gather", output, input);
  }

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    if (tensor.numel() == 0) {
      return done_work();
    }
    return gloo_reduces(tensor.scalar_type(), op) ? native_all_reduce(tensor, op)
                                                  : gathered_all_reduce(tensor, op);
  }

  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override {
    if (input.numel() == 0) {
      return done_work();
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor parts = at::empty({size(), output.numel()}, input.options());
    const auto bytes = static_cast<std::int64_t>(output.nbytes());
    const std::vector<std::int64_t> counts(static_cast<std::size_t>(size()), bytes);
    return exchange("reduce_scatter", parts, input, counts, counts,
                    [output, parts, op] { reduce_rows(output, parts, op); });
  }

  WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input,
                     std::span<const std::int64_t> output_counts,
                     std::span<const std::int64_t> input_counts) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return exchange("all_to_all", output, input,
                    counts_in_bytes(output_counts, output.element_size()),
                    counts_in_bytes(input_counts, input.element_size()));
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root) override {
    if (tensor.numel() == 0) {
      return done_work();
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::vector<at::Tensor> tensors = {as_bytes(tensor)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return run("broadcast", [&](auto& group) { return group.broadcast(tensors, options); });
  }

  void barrier() override {
    run("barrier", [](auto& group) { return group.barrier(); })->wait();
  }

  void abort() override { group_->abort(); }
  std::string name() const override { return "gloo"; }

 private:
  template <class Start>
  WorkPtr run(const char* collective, Start&& start, std::function<void()> finish = nullptr) {
    std::string text = with_purpose(collective, purpose());
    auto work = group_->start(text.c_str(), start);
    return std::make_shared<GlooWork>(group_, std::move(text), std::move(work), std::move(finish));
  }

  WorkPtr gather(const char* collective, const at::Tensor& output, const at::Tensor& input,
                 std::function<void()> finish = nullptr) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor to = as_bytes(output);
    at::Tensor from = as_bytes(input);
    return run(
        collective, [&](auto& group) { return group._allgather_base(to, from); },
        std::move(finish));
  }

  WorkPtr exchange(const char* collective, const at::Tensor& output, const at::Tensor& input,
                   std::vector<std::int64_t> output_bytes, std::vector<std::int64_t> input_bytes,
                   std::function<void()> finish = nullptr) {
    at::Tensor to = as_bytes(output);
    at::Tensor from = as_bytes(input);
    return run(
        collective,
        [&](auto& group) { return group.alltoall_base(to, from, output_bytes, input_bytes); },
        std::move(finish));
  }

  WorkPtr native_all_reduce(const at::Tensor& tensor, ReduceOp op) {
    std::vector<at::Tensor> tensors = {tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = to_c10d(op == ReduceOp::kAvg ? ReduceOp::kSum : op);
    std::function<void()> finish;
    if (op == ReduceOp::kAvg) {
      finish = [tensor, ranks = size()] { tensor.div_(ranks); };
    }
    return run(
        "all_reduce", [&](auto& group) { return group.allreduce(tensors, options); },
        std::move(finish));
  }

  WorkPtr gathered_all_reduce(const at::Tensor& tensor, ReduceOp op) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor parts = at::empty({size(), tensor.numel()}, tensor.options());
    return gather("all_reduce", parts, tensor,
                  [tensor, parts, op] { reduce_rows(tensor, parts, op); });
  }

  GlooGroupPtr group_;
};

}  // namespace

CommunicatorPtr make_gloo_communicator(const c10::intrusive_ptr<c10d::Store>& store,
                                       const GroupInfo& group, const std::string& address) {
  try {
    return std::make_shared<GlooCommunicator>(std::make_shared<GlooGroup>(store, group, address));
  } catch (const std::exception& error) {
    throw PeerError(describe(group, "setting up Gloo") + ": " + first_line(error.what()) +
                    "; check that every rank started and that the hosts reach each other");
  }
}

}  // namespace tessera::comm
