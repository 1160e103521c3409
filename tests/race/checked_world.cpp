#include "race/checked_world.h"

#include <memory>
#include <utility>
#include <vector>

#include "race/operator_watch.h"
#include "testing/forwarding_communicator.h"
#include "testing/wrapped_world.h"

namespace tessera::race {
namespace {

using comm::WorkPtr;

class CheckedWork final : public comm::Work {
 public:
  CheckedWork(WorkPtr work, RaceChecker& checker, Point end)
      : work_(std::move(work)), checker_(checker), end_(std::move(end)) {}

  void wait() override {
    const OperatorPause pause;  // of the back end's own operators
    work_->wait();
    checker_.join(end_);
  }

 private:
  WorkPtr work_;
  RaceChecker& checker_;
  Point end_;
};

class CheckedGroup final : public testing::ForwardingCommunicator {
 public:
  CheckedGroup(comm::CommunicatorPtr group, std::string name, RaceChecker& checker)
      : ForwardingCommunicator(std::move(group)), name_(std::move(name)), checker_(checker) {}

  WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
    return checked("all_gather", {input}, {output},
                   [&] { return inner().all_gather(output, input); });
  }
  WorkPtr all_gather_group(const std::vector<at::Tensor>& outputs,
                           const std::vector<at::Tensor>& inputs) override {
    return checked("all_gather", inputs, outputs,
                   [&] { return inner().all_gather_group(outputs, inputs); });
  }
  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    return checked("all_reduce", {tensor}, {tensor},
                   [&] { return inner().all_reduce(tensor, op); });
  }
  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override {
    return checked("reduce_scatter", {input}, {output},
                   [&] { return inner().reduce_scatter(output, input, op); });
  }
  WorkPtr reduce_scatter_group(const std::vector<at::Tensor>& outputs,
                               const std::vector<at::Tensor>& inputs, ReduceOp op) override {
    return checked("reduce_scatter", inputs, outputs,
                   [&] { return inner().reduce_scatter_group(outputs, inputs, op); });
  }
  WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input,
                     std::span<const std::int64_t> output_counts,
                     std::span<const std::int64_t> input_counts) override {
    return checked("all_to_all", {input}, {output},
                   [&] { return inner().all_to_all(output, input, output_counts, input_counts); });
  }
  WorkPtr broadcast(const at::Tensor& tensor, int root) override {
    const std::vector<at::Tensor> sent{tensor};
    const std::vector<at::Tensor> nothing;
    return checked("broadcast", root == rank() ? sent : nothing, root == rank() ? nothing : sent,
                   [&] { return inner().broadcast(tensor, root); });
  }
  void any_rank(std::span<std::uint8_t> flags) override {
    const OperatorPause pause;  // between the hosts
    inner().any_rank(flags);
  }
  void agree_on_calls(const std::string& trouble) override {
    const OperatorPause pause;
    inner().agree_on_calls(trouble);
  }

 private:
  template <class Call>
  WorkPtr checked(const char* name, const std::vector<at::Tensor>& inputs,
                  const std::vector<at::Tensor>& outputs, Call&& call) {
    const Point end =
        checker_.collective(name_, name, purpose(), memory_of(inputs), memory_of(outputs));
    const OperatorPause pause;
    return std::make_shared<CheckedWork>(call(), checker_, end);
  }

  std::string name_;
  RaceChecker& checker_;
};

}  // namespace

comm::WorldPtr checked_world(const comm::WorldPtr& world, RaceChecker& checker) {
  return std::make_shared<testing::WrappedWorld>(world, [&checker](comm::CommunicatorPtr group,
                                                                   const std::string& name) {
    return comm::CommunicatorPtr(std::make_shared<CheckedGroup>(std::move(group), name, checker));
  });
}

}  // namespace tessera::race
