// Collectives over TCP by c10d's Gloo. Additions: reductions of every dtype that round a sum once,
// early failure after another rank's failure, and exit despite waiting threads.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <atomic>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends.h"
#include "group_info.h"
#include "shm/shm_rounds.h"
#include "tessera/core/placement.h"
#include "tessera/internals/detail/c10d.h"
#include "watch/watch.h"

namespace tessera::comm {
namespace {

/// Whether libtorch's Gloo all-reduces tensors of dtype `type` as Tessera does. If not, Tessera
/// uses an all-gather and a local reduction.
bool gloo_reduces(at::ScalarType type, ReduceOp op) {
  switch (type) {
    case at::kFloat:
    case at::kDouble:
      // Gloo's maximum and minimum ignore NaN.
      return op != ReduceOp::kMax && op != ReduceOp::kMin;
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return true;
    default:
      return false;  // Gloo lacks this dtype, or rounds 16-bit sums after each term
  }
}

std::vector<std::int64_t> counts_in_bytes(std::span<const std::int64_t> counts,
                                          std::size_t item_bytes) {
  std::vector<std::int64_t> result;
  for (const std::int64_t count : counts) {
    result.push_back(count * static_cast<std::int64_t>(item_bytes));
  }
  return result;
}

/// Sets `output`, of shape (n), to the reduction over the rows of `parts`, of shape (ranks, n). The
/// fixed order of the rows gives all ranks equal bits.
void reduce_rows(const at::Tensor& output, const at::Tensor& parts, ReduceFunction reduce) {
  std::vector<const std::byte*> rows;
  for (std::int64_t row = 0; row < parts.size(0); ++row) {
    rows.push_back(data_of(parts) + row * bytes_of(output));
  }
  reduce(data_of(output), rows, static_cast<std::size_t>(output.numel()));
}

/// Returns the tensor as bytes, for collectives that only move data. as_strided() makes the tensor
/// one-dimensional with stride 1, which view() to a dtype of another size requires.
at::Tensor as_bytes(const at::Tensor& contiguous) {
  return contiguous.as_strided({contiguous.numel()}, {1}).view(at::kByte);
}

}  // namespace

detail::GroupReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return detail::GroupReduceOp::SUM;
    case ReduceOp::kAvg:
      return detail::GroupReduceOp::AVG;
    case ReduceOp::kMax:
      return detail::GroupReduceOp::MAX;
    case ReduceOp::kMin:
      return detail::GroupReduceOp::MIN;
    case ReduceOp::kProduct:
      return detail::GroupReduceOp::PRODUCT;
  }
  return detail::GroupReduceOp::SUM;
}

namespace {

using std::chrono::milliseconds;

/// The interval at which a waiting rank checks whether the other ranks are still alive.
constexpr milliseconds kGlooCheck{200};
/// How much longer Gloo's time-out is than Tessera's. Gloo must never time out first, because a
/// rank that reads or writes files can make the other ranks wait.
constexpr std::chrono::hours kGlooPatience{24};

/// c10d's process group for Gloo, and whether the process group has failed. Shared by the
/// communicator and its Work objects.
class GlooGroup {
 public:
  GlooGroup(const detail::StorePtr& store, GroupInfo group, const std::string& address)
      : group_(std::move(group)) {
    // Gloo's time-out is very long, because Gloo's messages cannot name the missing rank; Tessera's
    // time-out comes first.
    process_group_ = detail::make_gloo_group(store, {.rank = group_.rank,
                                                     .size = group_.size(),
                                                     .timeout = group_.timeout + kGlooPatience,
                                                     .address = address});
  }

  GlooGroup(const GlooGroup&) = delete;
  GlooGroup& operator=(const GlooGroup&) = delete;

  ~GlooGroup() {
    // A failed process group is leaked, because its destructor waits for Gloo's threads, and a
    // thread can wait for a dead rank until the time-out.
    if (failed_) {
      process_group_.release();
    }
  }

  const GroupInfo& info() const { return group_; }

  std::uint64_t number() const { return group_.watch->number(); }

  template <class Start>
  detail::GroupWorkPtr start(const char* collective, Start&& start) {
    // After a failure no collective starts: a new collective could receive the remaining bytes of
    // the failed collective on one of Gloo's connections.
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

  void wait(detail::GroupWork& work, const char* collective, std::uint64_t number) {
    try {
      await(work, collective, number);
    } catch (const PeerError&) {
      failed_ = true;
      throw;
    } catch (const std::exception& error) {
      give_up(collective, error.what());
    }
  }

  void abort() { failed_ = true; }

 private:
  /// Waits for a Gloo operation. Returns false if the operation still runs after `duration`.
  /// Rethrows the operation's exception.
  static bool wait_a_little(detail::GroupWork& work, milliseconds duration) {
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

  void await(detail::GroupWork& work, const char* collective, std::uint64_t number) {
    // Waits repeatedly for a short time, because GroupWork::wait() does not check the other ranks.
    PeerWait peers(group_, collective, number);
    while (!wait_a_little(work, kGlooCheck)) {
      peers.check();
    }
  }

  [[noreturn]] void give_up(const char* collective, const std::string& reason) {
    failed_ = true;
    fail_without_peers(group_, collective, first_line(reason));
  }

  GroupInfo group_;
  detail::GroupPtr process_group_;
  std::atomic<bool> failed_{false};
};
using GlooGroupPtr = std::shared_ptr<GlooGroup>;

/// A running Gloo operation. When the operation has ended, wait() calls `finish`.
class GlooWork final : public Work {
 public:
  GlooWork(GlooGroupPtr group, std::string collective, detail::GroupWorkPtr work,
           std::function<void()> finish = nullptr)
      : group_(std::move(group)),
        collective_(std::move(collective)),
        number_(group_->number()),
        work_(std::move(work)),
        finish_(std::move(finish)) {}

  void wait() override {
    if (work_ == nullptr) {
      return;
    }
    group_->wait(*work_, collective_.c_str(), number_);
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
  std::uint64_t number_;
  detail::GroupWorkPtr work_;
  std::function<void()> finish_;
};

class GlooCommunicator final : public Communicator {
 public:
  explicit GlooCommunicator(GlooGroupPtr group)
      : Communicator(group->info().rank, group->info().size()), group_(std::move(group)) {}

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

  // A reduce-scatter is an all-to-all and a local sum: rank r receives part r of each rank's input
  // and reduces these parts. Each byte is sent only once.
  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override {
    if (input.numel() == 0) {
      return done_work();
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const ReduceFunction reduce =
        reduction(group_->info(), "reduce_scatter", input.scalar_type(), op);
    const at::Tensor parts = at::empty({size(), output.numel()}, input.options());
    const std::vector<std::int64_t> counts(static_cast<std::size_t>(size()), bytes_of(output));
    return exchange("reduce_scatter", parts, input, counts, counts,
                    [=] { reduce_rows(output, parts, reduce); });
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
    std::vector<at::Tensor> bytes{as_bytes(tensor)};
    return run("broadcast",
               [&](auto& group) { return group.broadcast(bytes, {.rootRank = root}); });
  }

  void barrier() override {
    run("barrier", [](auto& group) { return group.barrier(); })->wait();
  }

  void abort() override { group_->abort(); }
  std::string name() const override { return "gloo"; }

 private:
  /// Runs one collective. `start` starts the operation on c10d's process group; `finish` is called
  /// after the operation has ended.
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
    const auto sum = to_c10d(op == ReduceOp::kAvg ? ReduceOp::kSum : op);
    std::function<void()> finish;
    if (op == ReduceOp::kAvg) {
      finish = [tensor, ranks = size()] { tensor.div_(ranks); };
    }
    std::vector<at::Tensor> tensors{tensor};
    return run(
        "all_reduce", [&](auto& group) { return group.allreduce(tensors, {.reduceOp = sum}); },
        std::move(finish));
  }

  // All-reduces tensors of any dtype by an all-gather and a local reduction. A sum is rounded once.
  // Sends n / 2 times the bytes of a ring all-reduce (n ranks).
  WorkPtr gathered_all_reduce(const at::Tensor& tensor, ReduceOp op) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const ReduceFunction reduce = reduction(group_->info(), "all_reduce", tensor.scalar_type(), op);
    const at::Tensor parts = at::empty({size(), tensor.numel()}, tensor.options());
    return gather("all_reduce", parts, tensor, [=] { reduce_rows(tensor, parts, reduce); });
  }

  GlooGroupPtr group_;
};

/// Connects to the other ranks on a detached thread, because Gloo waits for every other rank until
/// the time-out, even for a dead rank.
GlooGroupPtr connect(const detail::StorePtr& store, const GroupInfo& group,
                     const std::string& address) {
  std::packaged_task<GlooGroupPtr()> task(
      [=] { return std::make_shared<GlooGroup>(store, group, address); });
  std::future<GlooGroupPtr> made = task.get_future();
  std::thread(std::move(task)).detach();
  PeerWait peers(group, "set-up of Gloo");
  while (made.wait_for(kGlooCheck) != std::future_status::ready) {
    peers.check();
  }
  return made.get();
}

}  // namespace

CommunicatorPtr make_gloo_communicator(const detail::StorePtr& store, const GroupInfo& group,
                                       const std::string& address) {
  try {
    return std::make_shared<GlooCommunicator>(connect(store, group, address));
  } catch (const PeerError&) {
    throw;
  } catch (const std::exception& error) {
    fail_without_peers(group, "set-up of Gloo",
                       first_line(error.what()) + "; check that the hosts reach each other");
  }
}

}  // namespace tessera::comm
