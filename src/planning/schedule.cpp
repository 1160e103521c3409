// Simulates when the operators, collectives and waits of a training step begin and end.

#include "schedule.h"
#include "tessera/observe/detail/memory.h"

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>

namespace tessera::planning {

using comm::FakeCollective;
using comm::Lane;
using kernels::FakeCall;

namespace {

/// The FLOPs of flash attention's backward, divided by the FLOPs of its forward: backward has five
/// matrix products, forward has two.
constexpr double kAttentionBackward = 2.5;

double size_of(const at::Tensor& tensor, std::int64_t dim) {
  return static_cast<double>(tensor.size(dim));
}

/// Returns the FLOPs of attention's two products. A mask is assumed to remove half of the scores.
double attention_flops(const at::Tensor& query, const at::Tensor& key, bool masked) {
  return (masked ? 2.0 : 4.0) * size_of(query, 0) * size_of(query, 1) * size_of(query, 2) *
         size_of(key, 2) * size_of(query, 3);
}

/// Returns the FLOPs of a convolution. `small` is the result or, for a transposed convolution, the
/// input. Each element of `small` takes weight.numel() / weight.size(0) multiplications.
double convolution_flops(const at::Tensor& small, const at::Tensor& weight) {
  return 2.0 * static_cast<double>(small.numel()) * static_cast<double>(weight.numel()) /
         size_of(weight, 0);
}

/// Whether an operator writes its first argument without reading it.
bool only_writes(std::string_view name) {
  return name == "aten::copy_" || name == "aten::fill_" || name == "aten::zero_";
}

/// Returns the bytes of a tensor's memory. A dimension with stride 0 (expand) adds no memory.
double bytes_of(const at::Tensor& tensor) {
  auto bytes = static_cast<double>(tensor.element_size());
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    bytes *= tensor.stride(dim) == 0 ? 1.0 : size_of(tensor, dim);
  }
  return tensor.numel() == 0 ? 0 : bytes;
}

double bytes_of(const FakeCall& call) {
  double bytes = 0;
  for (const at::Tensor& tensor : call.inputs) {
    bytes += bytes_of(tensor);
  }
  for (const at::Tensor& tensor : call.results) {
    bytes += bytes_of(tensor);
  }
  if (only_writes(call.name) && !call.results.empty()) {
    bytes -= bytes_of(call.results.front());
  }
  return bytes;
}

/// Returns the name of an operator for messages. Steps are planned on a CPU, where flash attention
/// has another name than on a GPU.
std::string name_on(bool gpu, std::string name) {
  constexpr std::string_view kOnCpu = "_for_cpu";
  if (const std::size_t at = name.find(kOnCpu); gpu && at != std::string::npos) {
    name.erase(at, kOnCpu.size());
  }
  return name;
}

/// Returns how many ranks of a process group are on the machine of the group's first rank.
std::int64_t ranks_beside(const std::vector<int>& ranks, std::int64_t per_node) {
  const std::int64_t node = ranks.front() / per_node;
  return std::ranges::count_if(ranks, [&](int rank) { return rank / per_node == node; });
}

/// Returns the bytes that a rank sends around a ring of `n` ranks, per byte of the rank's input.
double ring_share(std::string_view collective, double n) {
  if (collective == "all_gather") {
    return n - 1;
  }
  if (collective == "all_reduce") {
    return 2 * (n - 1) / n;
  }
  return collective == "broadcast" ? 1 : (n - 1) / n;
}

bool adds_product(std::string_view name) {
  return name == "aten::addmm" || name == "aten::addmm_";
}

/// Returns the matrix whose dtype decides the FLOP/s: usually the first input. addmm adds its first
/// input to the product, so addmm's second input is returned.
const at::Tensor& first_factor(const FakeCall& call) {
  return call.inputs[adds_product(call.name) ? 1 : 0];
}

bool is_attention(std::string_view name) {
  return name.starts_with("aten::_scaled_dot_product_flash_attention_for_cpu");
}

/// Returns the FLOP/s of a matrix product or of attention. inputs[1] of attention (the key in
/// forward, the query in backward) has the head size as its last size.
double flops_rate(const Machine& machine, const FakeCall& call) {
  const c10::ScalarType type = first_factor(call).scalar_type();
  return is_attention(call.name) ? machine.attention_flops(type, call.inputs[1].size(-1))
                                 : machine.product_flops(type);
}

/// Returns the FLOPs of a matrix product, a convolution or attention (half of the FLOPs if
/// attention has a mask); 0 for other operators.
double product_flops(const FakeCall& call) {
  const std::string_view name = call.name;
  if (adds_product(name) || name == "aten::mm" || name == "aten::bmm" ||
      name == "aten::_scaled_mm") {
    return 2.0 * static_cast<double>(call.results.front().numel()) *
           size_of(first_factor(call), -1);
  }
  if (name == "aten::_grouped_mm") {
    return 2.0 * static_cast<double>(call.inputs[0].numel()) * size_of(call.inputs[1], -1);
  }
  const auto& arguments = call.arguments;
  if (name == "aten::_scaled_dot_product_flash_attention_for_cpu") {
    return attention_flops(call.inputs[0], call.inputs[1],
                           arguments[4].toBool() || !arguments[5].isNone());
  }
  if (name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward") {
    return kAttentionBackward * attention_flops(call.inputs[1], call.inputs[2],
                                                arguments[7].toBool() || !arguments[8].isNone());
  }
  if (name == "aten::convolution") {
    const bool transposed = arguments[6].toBool();
    return convolution_flops(transposed ? call.inputs[0] : call.results[0], call.inputs[1]);
  }
  if (name == "aten::convolution_backward") {
    const bool transposed = arguments[7].toBool();
    const c10::List<bool> wanted = arguments[10].toBoolList();
    return (wanted[0] + wanted[1]) *
           convolution_flops(call.inputs[transposed ? 1 : 0], call.inputs[2]);
  }
  return 0;
}

}  // namespace

struct Schedule::Event final : comm::StreamEvent {
  explicit Event(Moment at) : moment(std::move(at)) {}
  Moment moment;
};

class Schedule::Transfer final : public comm::Work {
 public:
  Transfer(Schedule& schedule, Moment end) : schedule_(schedule), end_(std::move(end)) {}
  void wait() override { schedule_.wait(schedule_.current_, end_); }

 private:
  Schedule& schedule_;
  Moment end_;
};

void Schedule::add_span(const std::string& row, const std::string& what, double begin, double end) {
  const auto last = std::ranges::find(step_.spans.rbegin(), step_.spans.rend(), row, &Span::row);
  if (last != step_.spans.rend() && last->what == what && last->end >= begin - began_) {
    last->end = end - began_;
  } else {
    step_.spans.push_back({row, what, begin - began_, end - began_});
  }
}

void Schedule::run(const FakeCall& call, observe::MemoryPhase phase) {
  if (!machine_) {
    return;
  }
  const double flops = product_flops(call);
  const double bytes = bytes_of(call);
  const double by_memory = bytes / (machine_->memory_bandwidth * machine_->memory_share);
  double seconds = std::max(by_memory, machine_->operator_latency_s);
  double& now = lane(current_).time;
  if (flops > 0) {
    seconds = std::max(seconds, flops / flops_rate(*machine_, call));
    if (has_lanes_ && current_ == Lane::kCompute) {
      seconds += lost_to_collectives(now, seconds);
    }
    step_.flops += flops;
  }
  OperatorUse& use = step_.operators[name_on(has_lanes_, call.name)];
  ++use.calls;
  use.bytes += bytes;
  use.flops += flops;
  use.seconds += seconds;
  if (!has_lanes_ || current_ == Lane::kCompute) {
    step_.compute += seconds;
    add_span("operators", to_string(phase), now, now + seconds);
  }
  now += seconds;
}

/// Returns how many seconds longer an operator takes, because collectives run at the same time.
/// Erases collectives that ended before `begin`, because later operators begin later.
double Schedule::lost_to_collectives(double begin, double seconds) {
  const double taken = machine_->collective_multiprocessors;
  if (machine_->multiprocessors <= taken) {  // 0: the number of multiprocessors is unknown
    return 0;
  }
  std::erase_if(transfers_, [&](const auto& transfer) { return transfer.second <= begin; });
  double overlap = 0, covered = begin;
  for (const auto& [from, to] : transfers_) {
    const double first = std::max(from, covered), last = std::min(to, begin + seconds);
    overlap += std::max(last - first, 0.0);
    covered = std::max(covered, last);
  }
  return overlap * taken / (machine_->multiprocessors - taken);
}

double Schedule::duration(const FakeCollective& call) const {
  const auto n = static_cast<double>(call.ranks.size());
  const std::int64_t beside = ranks_beside(call.ranks, machine_->ranks_per_node);
  const bool within_node = beside == std::ssize(call.ranks);
  // Across machines, a collective uses as many rings as the process group has ranks on one machine,
  // because each rank has a network card.
  const double network = machine_->network_bandwidth * static_cast<double>(beside);
  const double rate =
      within_node ? machine_->link_bandwidth : std::min(network, machine_->link_bandwidth);
  const double latency = within_node ? machine_->link_latency_s : machine_->network_latency_s;
  return latency + ring_share(call.collective, n) * static_cast<double>(call.bytes) /
                       (rate * machine_->network_share);
}

comm::WorkPtr Schedule::start(const FakeCollective& call) {
  if (!machine_) {
    return nullptr;
  }
  const double seconds = duration(call);
  double& network = networks_[call.group];
  network = std::max(network, lane(current_).time) + seconds;
  step_.communication[call.group] += seconds;
  add_span(call.group, call.collective, network - seconds, network);
  if (has_lanes_) {
    transfers_.emplace(network - seconds, network);
  }
  const Moment end{network, call.group};
  if (!has_lanes_) {
    wait(current_, end);  // a CPU has only one stream, so the stream waits for the transfer
  }
  return std::make_shared<Transfer>(*this, end);
}

comm::StreamEventPtr Schedule::record(Lane which) {
  return has_lanes_ ? std::make_shared<Event>(lanes_[static_cast<std::size_t>(which)]) : nullptr;
}

void Schedule::wait(Lane which, const comm::StreamEventPtr& event) {
  if (event != nullptr) {
    wait(which, static_cast<const Event&>(*event).moment);
  }
}

void Schedule::wait(Lane which, const Moment& moment) {
  Moment& now = lane(which);
  if (moment.time <= now.time) {
    return;
  }
  if (!has_lanes_ || which == Lane::kCompute) {
    const std::string cause = moment.cause.empty() ? "copies" : moment.cause;
    step_.exposed[cause] += moment.time - now.time;
    add_span("waiting", cause, now.time, moment.time);
  }
  now = moment;
}

void Schedule::begin_step() {
  step_ = {};
  began_ = lane(Lane::kCompute).time;
}

StepTime Schedule::time() const {
  StepTime time = step_;
  const auto* const latest = std::ranges::max_element(lanes_, {}, &Moment::time);
  time.total = latest->time - began_;
  return time;
}

}  // namespace tessera::planning
