// Notes each allocation and its end with the current phase and lane. The purpose of a block is
// known only when it is freed: a block that a forward leaves allocated is an activation.

#include "tessera/observe/memory_log.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "tessera/comm/trace.h"
#include "tessera/internals/detail/backward.h"

namespace tessera::observe {

using comm::Lane;

const char* to_string(MemoryPhase phase) {
  constexpr std::array names{"setup", "forward", "backward", "update"};
  return names[static_cast<std::size_t>(phase)];
}

const char* to_string(MemoryKind kind) {
  constexpr std::array<const char*, kMemoryKinds> names{
      "parameters",           "optimizer",   "gradients", "gathered parameters",
      "gradients on the way", "activations", "temporary"};
  return names[static_cast<std::size_t>(kind)];
}

bool is_state(MemoryKind kind) {
  return kind == MemoryKind::kParameters || kind == MemoryKind::kOptimizer ||
         kind == MemoryKind::kGradients;
}

/// Recognises FSDP's work by the lane, and learns its unit as the communication begins.
class MemoryLog::Lanes final : public comm::Streams {
 public:
  Lanes(MemoryLog& log, comm::StreamsPtr inner) : log_(log), inner_(std::move(inner)) {}
  comm::StreamEventPtr record(Lane lane) override { return inner_->record(lane); }
  void wait(Lane lane, const comm::StreamEventPtr& event) override { inner_->wait(lane, event); }
  void synchronize(const comm::StreamEventPtr& event) override { inner_->synchronize(event); }

  void note(const std::string& what) override { inner_->note(what); }
  void begin_unit(Lane lane, const std::string& unit) override {
    inner_->begin_unit(lane, unit);
    const std::lock_guard lock(log_.mutex_);
    log_.communicated_[static_cast<std::size_t>(lane)] = log_.number_of({unit, /*is_unit=*/true});
  }

 private:
  void enter(Lane lane) override {
    inner_scope_.emplace(*inner_, lane);
    const std::lock_guard lock(log_.mutex_);
    log_.lane_ = lane;
  }
  void leave() override {
    inner_scope_.reset();
    const std::lock_guard lock(log_.mutex_);
    log_.lane_ = Lane::kCompute;
  }

  MemoryLog& log_;
  comm::StreamsPtr inner_;
  std::optional<comm::LaneScope> inner_scope_;
};

MemoryLog::MemoryLog(TensorMemoryOptions options) : reserve_only_(options.reserve_only) {
  options.observer = [this](const TensorBlock& block) { note(block); };
  count_tensor_memory(std::move(options));
}

MemoryLog::~MemoryLog() {
  count_tensor_memory({.reserve_only = reserve_only_});
}

comm::StreamsPtr MemoryLog::memory_lanes(comm::StreamsPtr lanes) {
  return std::make_shared<Lanes>(*this, std::move(lanes));
}

void MemoryLog::begin_step(std::function<std::string()> where, bool moments) {
  const std::lock_guard lock(mutex_);
  std::erase_if(blocks_, [](const auto& entry) {
    return entry.second.ended != std::numeric_limits<int>::max();
  });
  for (auto& [number, block] : blocks_) {
    block.earlier = true;
  }
  events_.clear();
  phase_ = MemoryPhase::kForward;
  phases_ += 1;
  peak_ = 0;
  where_ = std::move(where);
  follows_moments_ = moments;
  moments_.assign(1, "the forward");
  moment_ = 0;
}

namespace {

/// Whether the thread is in what changes the parameters, or in what comes before it.
bool is_update(std::string_view caller) {
  return caller == "clip_grad_norm_" || caller == "unscale_" || caller == "optimizer step";
}

}  // namespace

/// Phases are not announced: autograd knows when it runs, and code that clips norms or updates
/// names itself.
void MemoryLog::update_phase() {
  if (phase_ == MemoryPhase::kSetup || phase_ == MemoryPhase::kUpdate) {
    return;
  }
  MemoryPhase now =
      tessera::detail::backward_id() >= 0 ? MemoryPhase::kBackward : MemoryPhase::kForward;
  if (is_update(comm::CallerScope::outermost())) {
    now = MemoryPhase::kUpdate;
  }
  phases_ += now == phase_ ? 0 : 1;
  phase_ = now;
}

std::size_t MemoryLog::number_of(const Owner& owner) {
  const auto [found, is_new] = owner_numbers_.emplace(owner, owners_.size());
  if (is_new) {
    owners_.push_back(owner);
  }
  return found->second;
}

std::size_t MemoryLog::owner_of_new() const {
  if (lane_ == Lane::kAllGather || lane_ == Lane::kReduceScatter) {
    return communicated_[static_cast<std::size_t>(lane_)];
  }
  return modules_.empty() ? 0 : modules_.back();
}

/// Usually the moment of the allocation before.
void MemoryLog::update_moment() {
  std::string name = phase_ == MemoryPhase::kUpdate ? "" : where_();
  if (name.empty()) {
    name = std::string("the ") + to_string(phase_);
  }
  if (moments_[moment_] != name) {
    const auto known = std::ranges::find(moments_, name);
    moment_ = static_cast<std::size_t>(known - moments_.begin());
    if (known == moments_.end()) {
      moments_.push_back(std::move(name));
    }
  }
}

/// The thread that reads batches ahead allocates, too, whatever the phase.
void MemoryLog::note(const TensorBlock& block) {
  const std::lock_guard lock(mutex_);
  const bool by_step = std::this_thread::get_id() == thread_;
  if (by_step) {
    update_phase();
  }
  if (block.freed) {
    const auto known = blocks_.find(block.number);
    if (known == blocks_.end()) {
      return;  // of an earlier rank
    }
    known->second.ended = phases_;
    live_blocks_.erase(known->second.data);
    live_ -= block.bytes;
    events_.push_back({block.number, true, phase_, moment_});
    return;
  }
  blocks_[block.number] = {.data = block.data,
                           .bytes = block.bytes,
                           .born = phase_,
                           .lane = by_step ? lane_ : Lane::kCompute,
                           .owner = by_step ? owner_of_new() : 0,
                           .began = phases_,
                           .ended = std::numeric_limits<int>::max()};
  live_blocks_[block.data] = block.number;
  live_ += block.bytes;
  if (follows_moments_ && by_step) {
    update_moment();
  }
  events_.push_back({block.number, false, phase_, moment_});
  if (live_ > peak_ && by_step && where_) {
    note_peak();
  }
}

void MemoryLog::note_peak() {
  peak_ = live_;
  peak_event_ = events_.size();
  peak_moment_ = where_();
  if (peak_moment_.empty()) {
    peak_moment_ = std::string("the ") + to_string(phase_);
  }
}

void MemoryLog::assign(const at::Tensor& tensor, const std::string& module) {
  assign(tensor, module, /*is_state=*/false);
}

void MemoryLog::assign_state(const at::Tensor& tensor, const std::string& module) {
  assign(tensor, module, /*is_state=*/true);
}

void MemoryLog::assign(const at::Tensor& tensor, const std::string& module, bool is_state) {
  const void* data = tensor.const_data_ptr();
  const std::lock_guard lock(mutex_);
  const auto after = live_blocks_.upper_bound(data);
  if (data == nullptr || after == live_blocks_.begin()) {
    return;
  }
  const auto& [begin, number] = *std::prev(after);
  Block& block = blocks_.at(number);
  if (static_cast<const char*>(data) < static_cast<const char*>(begin) + block.bytes) {
    block.parts[data] = {number_of({module}), static_cast<std::int64_t>(tensor.nbytes())};
    block.is_state = is_state;
  }
}

void MemoryLog::entered(Activity activity, const std::string& name) {
  const std::lock_guard lock(mutex_);
  const std::size_t around = modules_.empty() ? 0 : modules_.back();
  modules_.push_back(activity == Activity::kScope ? around : number_of({name}));
}

void MemoryLog::left() {
  const std::lock_guard lock(mutex_);
  modules_.pop_back();
}

MemoryKind MemoryLog::kind_of(const Block& block) {
  if (block.earlier && (block.is_state || block.born == MemoryPhase::kUpdate)) {
    return MemoryKind::kOptimizer;
  }
  if (block.earlier && block.born == MemoryPhase::kBackward) {
    return MemoryKind::kGradients;
  }
  if (block.earlier) {
    // The first forward makes shards, which are assigned, and masks, which are not.
    return block.born == MemoryPhase::kForward && block.parts.empty() ? MemoryKind::kActivations
                                                                      : MemoryKind::kParameters;
  }
  if (block.lane == Lane::kAllGather) {
    return MemoryKind::kGathered;
  }
  const bool outlives = block.ended > block.began;
  if (outlives && block.born == MemoryPhase::kBackward) {
    return MemoryKind::kGradients;
  }
  if (block.lane == Lane::kReduceScatter) {
    return MemoryKind::kReduced;
  }
  return outlives && block.born == MemoryPhase::kForward ? MemoryKind::kActivations
                                                         : MemoryKind::kTemporary;
}

/// The unit of each owner.
std::vector<std::string> MemoryLog::units(
    const std::function<std::string(const std::string&)>& of) const {
  std::vector<std::string> units(owners_.size());
  for (std::size_t i = 1; i < owners_.size(); ++i) {
    const auto& [name, is_unit] = owners_[i];
    units[i] = is_unit ? name : (of ? of(name) : "");
  }
  return units;
}

/// The allocated memory, block after block, and its maximum.
class MemoryLog::Count {
 public:
  /// `units`: of each owner.
  Count(StepMemory& memory, std::vector<std::string> units, bool on_host)
      : memory_(memory), unit_names_(std::move(units)), on_host_(on_host) {}

  /// Bytes of a block without an owner, such as padding, count with its first part.
  void add(const Block& block, std::int64_t sign) {
    const MemoryKind kind = kind_of(block);
    std::int64_t rest = block.bytes;
    for (const auto& [data, part] : block.parts) {
      add(kind, unit_names_[part.owner], sign * part.bytes);
      rest -= part.bytes;
    }
    const bool is_cut = !block.parts.empty();
    add(kind, unit_names_[is_cut ? block.parts.begin()->second.owner : block.owner], sign * rest);
  }
  /// Whether the memory is at a new maximum; if so, notes it.
  bool is_peak() {
    if (sum_ <= memory_.peak_bytes) {
      return false;
    }
    memory_.peak_bytes = sum_;
    memory_.at_peak = live_;
    at_peak_ = units_;
    return true;
  }
  /// Notes the memory after an event, if it is a new maximum of its moment.
  void note(std::size_t event, const std::string& moment) {
    auto& [at, most] = moments_[moment];
    if (sum_ > most.bytes) {
      at = event;
      most = {moment, sum_, live_};
    }
  }
  void end() {
    for (const auto& [unit, bytes] : at_peak_) {
      memory_.units[unit].at_peak = bytes;
    }
    std::map<std::size_t, MomentMemory> by_event;
    for (auto& [name, most] : moments_) {
      by_event.insert(std::move(most));
    }
    for (auto& [event, most] : by_event) {
      memory_.moments.push_back(std::move(most));
    }
  }

 private:
  void add(MemoryKind kind, const std::string& unit, std::int64_t bytes) {
    const auto at = static_cast<std::size_t>(kind);
    live_[at] += bytes;
    memory_.most[at] = std::max(memory_.most[at], live_[at]);
    std::int64_t& of_unit = units_[unit][at];
    of_unit += bytes;
    std::int64_t& most = memory_.units[unit].most[at];
    most = std::max(most, of_unit);
    sum_ += on_host_ && is_state(kind) ? 0 : bytes;
  }

  StepMemory& memory_;
  std::vector<std::string> unit_names_;
  bool on_host_;
  BytesByKind live_{};
  std::map<std::string, BytesByKind> units_, at_peak_;
  std::map<std::string, std::pair<std::size_t, MomentMemory>> moments_;  ///< with their events
  std::int64_t sum_ = 0;
};

StepMemory MemoryLog::use(bool on_host,
                          const std::function<std::string(const std::string&)>& unit_of) const {
  const std::lock_guard lock(mutex_);
  StepMemory memory;
  Count count(memory, units(unit_of), on_host);
  for (const auto& [number, block] : blocks_) {
    if (block.earlier) {
      count.add(block, 1);
    }
  }
  for (std::size_t i = 0; i < events_.size(); ++i) {
    if (const auto found = blocks_.find(events_[i].number); found != blocks_.end()) {
      count.add(found->second, events_[i].freed ? -1 : 1);
    }
    if (follows_moments_ && !events_[i].freed) {
      count.note(i, moments_[events_[i].moment]);
    }
    if (count.is_peak()) {
      memory.peak_moment =
          i + 1 == peak_event_ ? peak_moment_ : std::string("the ") + to_string(events_[i].phase);
    }
  }
  count.end();
  return memory;
}

}  // namespace tessera::observe
