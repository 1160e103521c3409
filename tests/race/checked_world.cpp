#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <array>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "fsdp/param_group.h"
#include "fsdp/unit.h"
#include "race/checked_world.h"
#include "race/operator_watch.h"
#include "testing/forwarding_communicator.h"

namespace tessera::race {
namespace {

using comm::Lane;
using comm::StreamEventPtr;

struct Event final : comm::StreamEvent {
  Event(Lane of, Point at) : lane(of), point(std::move(at)) {}
  Lane lane;
  Point point;
};

const Event& event_of(const StreamEventPtr& event) {
  return static_cast<const Event&>(*event);
}

std::string demangled(const char* symbol) {
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(symbol, nullptr, nullptr, nullptr), &std::free);
  std::string text = name != nullptr ? name.get() : symbol;
  return text.substr(0, text.find('('));
}

std::string function_at(void* address) {
  Dl_info info{};
  dladdr(address, &info);
  return info.dli_sname != nullptr ? demangled(info.dli_sname) : std::string(info.dli_fname);
}

/// Returns the name of the caller `depth` frames up the stack. Streams::order() is skipped.
std::string caller(int depth) {
  std::array<void*, 12> frames{};
  const int count = backtrace(frames.data(), static_cast<int>(frames.size()));
  thread_local std::map<void*, std::string> names;
  for (int i = depth + 1; i < count; ++i) {
    void* const address = frames[static_cast<std::size_t>(i)];
    auto known = names.find(address);
    if (known == names.end()) {
      known = names.emplace(address, function_at(address)).first;
    }
    if (known->second.find("Streams::order") == std::string::npos) {
      return known->second;
    }
  }
  return "unknown";
}

}  // namespace

bool CheckedStreams::is_left_out(const Site& site) {
  sites_.insert(site);
  return site == left_out_;
}

StreamEventPtr CheckedStreams::record(Lane lane) {
  return std::make_shared<Event>(lane, checker_->record(lane));
}

void CheckedStreams::wait(Lane lane, const StreamEventPtr& event) {
  if (event == nullptr) {
    return;
  }
  const Event& end = event_of(event);
  if (!is_left_out(caller(1) + ": " + comm::to_string(lane) + " after " +
                   comm::to_string(end.lane))) {
    checker_->wait(lane, end.point);
  }
}

void CheckedStreams::synchronize(const StreamEventPtr& event) {
  if (event == nullptr) {
    return;
  }
  const Event& end = event_of(event);
  if (!is_left_out(caller(1) + ": the host after " + comm::to_string(end.lane))) {
    checker_->synchronize(end.point);
  }
}

CheckedRank::CheckedRank(const Rank& rank, Site left_out)
    : rank_(rank),
      checker_(std::make_shared<RaceChecker>()),
      streams_(std::make_shared<CheckedStreams>(*checker_, std::move(left_out))),
      world_(checked_world(rank.world(), *checker_)),
      operators_(std::make_unique<OperatorWatch>(*checker_)),
      allocations_(checker_) {}

CheckedRank::~CheckedRank() {
  checker_->stop();
}

DeviceMesh CheckedRank::mesh(std::vector<std::int64_t> sizes,
                             std::vector<std::string> names) const {
  return init_device_mesh(world_, std::move(sizes), std::move(names));
}

void CheckedRank::watch(const nn::ModuleBase& root) {
  root.attached<fsdp::Unit>()->set_comm_context(
      std::make_shared<fsdp::CommContext>(streams_, at::kCPU));
}

namespace {

using comm::WorkPtr;

class CheckedWork final : public comm::Work {
 public:
  CheckedWork(WorkPtr work, RaceChecker& checker, Point end)
      : work_(std::move(work)), checker_(checker), end_(std::move(end)) {}

  void wait() override {
    const OperatorPause pause;
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
    const OperatorPause pause;
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
