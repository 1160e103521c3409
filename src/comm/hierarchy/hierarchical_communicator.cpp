#include "hierarchy/hierarchical_communicator.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <functional>
#include <utility>

#include "backends.h"
#include "gloo/c10d_arguments.h"
#include "gloo/link_bytes.h"
#include "hierarchy/phases.h"
#include "hierarchy/task_thread.h"
#include "shm/shm_reduce.h"
#include "tessera/comm/trace.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

/// The type that partial results travel in between the hosts.
at::ScalarType type_of_partials(at::ScalarType type, ReduceOp op) {
  const bool has_16_bits = type == at::kHalf || type == at::kBFloat16;
  const bool rounds = op != ReduceOp::kMax && op != ReduceOp::kMin;
  return has_16_bits && rounds ? at::kFloat : type;
}

/// The average is divided once, when all terms are in.
ReduceOp op_of_partials(ReduceOp op) {
  return op == ReduceOp::kAvg ? ReduceOp::kSum : op;
}

/// A call under way. What is left to do on its results is done by the thread that waits, with the
/// threads that it computes with.
class HierarchicalWork final : public Work {
 public:
  HierarchicalWork(std::shared_future<void> done, std::function<void()> finish)
      : done_(std::move(done)), finish_(std::move(finish)) {}

  void wait() override {
    done_.get();
    if (finish_) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      std::exchange(finish_, nullptr)();
    }
  }

 private:
  std::shared_future<void> done_;
  std::function<void()> finish_;
};

class HierarchicalCommunicator final : public Communicator {
 public:
  HierarchicalCommunicator(HostGroups groups, LazyHostGroup::Make flat)
      : Communicator(groups.group.rank, groups.group.size()),
        phases_(std::make_shared<Phases>(std::move(groups))),
        flat_(std::move(flat)) {}

  WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
    if (input.numel() == 0) {
      return done_work();
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor from = as_bytes(input);
    const at::Tensor to = as_bytes(output);
    const at::Tensor rows = layout().in_order() ? to : at::empty_like(to);
    count((layout().hosts() - 1) * layout().count_here() * from.numel());
    return run(
        "all_gather", [=](const Phases& phases) { phases.all_gather(rows, from); },
        [order = layout().order, rows, to] { take_rows(to, rows, order); });
  }

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    check_reduction("all_reduce", tensor, op);
    if (tensor.numel() == 0) {
      return done_work();
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor sum = tensor.to(type_of_partials(tensor.scalar_type(), op));
    const ReduceOp partial = op_of_partials(op);
    count(all_reduce_link_bytes(phases_->between(), sum, partial));
    return run(
        "all_reduce", [=](const Phases& phases) { phases.all_reduce(sum.view({-1}), partial); },
        [=, ranks = size()] {
          if (op == ReduceOp::kAvg) {
            sum.div_(ranks);
          }
          if (!sum.is_same(tensor)) {
            tensor.copy_(sum);
          }
        });
  }

  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override {
    check_reduction("reduce_scatter", input, op);
    if (input.numel() == 0) {
      return done_work();
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor rows = at::empty(
        {input.numel()}, input.options().dtype(type_of_partials(input.scalar_type(), op)));
    put_rows(rows, input);
    const ReduceOp partial = op_of_partials(op);
    const std::int64_t others = rows.numel() - layout().count_here() * output.numel();
    count(others * static_cast<std::int64_t>(rows.element_size()));
    const at::Tensor own =
        rows.narrow(0, (layout().first_here() + layout().local) * output.numel(), output.numel());
    return run(
        "reduce_scatter", [=](const Phases& phases) { phases.reduce_scatter(rows, partial); },
        [=, ranks = size()] {
          if (op == ReduceOp::kAvg) {
            own.div_(ranks);
          }
          output.view({-1}).copy_(own);
        });
  }

  // Every pair of ranks has bytes of its own: a flow a host would not be fewer.
  WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input,
                     std::span<const std::int64_t> output_counts,
                     std::span<const std::int64_t> input_counts) override {
    Communicator& flat = flat_.get();
    flat.set_purpose(purpose());
    const std::int64_t sent_before = flat.link_bytes();
    WorkPtr work = flat.all_to_all(output, input, output_counts, input_counts);
    link_bytes_ += flat.link_bytes() - sent_before;
    return work;
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root) override {
    if (tensor.numel() == 0) {
      return done_work();
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor bytes = as_bytes(tensor);
    const int root_host = HostLayout(phases_->as_rank(root)).host;
    count(broadcast_link_bytes(phases_->between(), bytes.numel(), root_host));
    return run("broadcast", [=](const Phases& phases) { phases.broadcast(bytes, root); });
  }

  void barrier() override {
    run("barrier", [](const Phases& phases) { phases.barrier(); })->wait();
  }

  void abort() override {
    thread_.leave_behind();
    phases_->abort();
    flat_.abort();
  }

  /// The other ranks need this one also in calls that nobody waits for.
  void shutdown(std::chrono::milliseconds patience) override {
    if (last_.valid()) {
      last_.wait_for(patience);
    }
  }

  std::int64_t link_bytes() const override { return link_bytes_; }
  std::string name() const override { return "hierarchical"; }

 private:
  const HostLayout& layout() const { return phases_->layout(); }

  /// Only leaders send to other hosts.
  void count(std::int64_t bytes) { link_bytes_ += phases_->leads() ? bytes : 0; }

  void check_reduction(const char* collective, const at::Tensor& tensor, ReduceOp op) const {
    TESSERA_CHECK(find_reduce(tensor.scalar_type(), op) != nullptr,
                  describe(phases_->group(), collective), ": ", to_string(op), " of ",
                  tensor.scalar_type(),
                  " is not implemented; convert to float, or to another type");
  }

  /// From host by host to the group's order.
  static void take_rows(const at::Tensor& to, const at::Tensor& rows,
                        const std::vector<int>& order) {
    if (rows.is_same(to)) {
      return;
    }
    const std::int64_t row = rows.numel() / static_cast<std::int64_t>(order.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
      to.narrow(0, order[i] * row, row)
          .copy_(rows.narrow(0, static_cast<std::int64_t>(i) * row, row));
    }
  }

  /// The reverse; `rows` may be of another type.
  void put_rows(const at::Tensor& rows, const at::Tensor& from) const {
    const std::int64_t row = rows.numel() / size();
    for (int i = 0; i < size(); ++i) {
      const int rank = layout().order[static_cast<std::size_t>(i)];
      rows.narrow(0, i * row, row).copy_(from.view({-1}).narrow(0, rank * row, row));
    }
  }

  WorkPtr run(const char* collective, std::function<void(Phases&)> phases,
              std::function<void()> finish = nullptr) {
    auto task = [groups = phases_, phases = std::move(phases),
                 text = with_purpose(collective, purpose()),
                 caller = std::string(CallerScope::outermost())] {
      const CallerScope scope(caller);
      groups->run(text, phases);
    };
    last_ = thread_.add(std::move(task));
    return std::make_shared<HierarchicalWork>(last_, std::move(finish));
  }

  std::shared_ptr<Phases> phases_;
  LazyHostGroup flat_;
  std::int64_t link_bytes_ = 0;
  std::shared_future<void> last_;  ///< call
  TaskThread thread_;
};

}  // namespace

CommunicatorPtr make_hierarchical_communicator(HostGroups groups) {
  LazyHostGroup::Make flat = std::move(groups.flat);
  return std::make_shared<HierarchicalCommunicator>(std::move(groups), std::move(flat));
}

}  // namespace tessera::comm
