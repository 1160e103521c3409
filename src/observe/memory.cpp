// Records when each memory block is allocated and freed, with the phase of the step and the stream.
// The kind of a block is known only when the block is freed: an activation, for example, lives
// longer than its forward.
#include "tessera/observe/detail/memory.h"
#include "tessera/comm/detail/scopes.h"
#include "tessera/observe/metrics.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <iterator>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "tessera/comm/detail/recording.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/internals/detail/devices.h"

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

/// Forwards calls to another Streams object and records the current stream (Lane). A MemoryLog
/// recognizes FSDP's communication buffers by the stream that allocated the buffers.
class MemoryLog::Lanes final : public comm::Streams {
 public:
  Lanes(MemoryLog& log, comm::StreamsPtr inner) : log_(log), inner_(std::move(inner)) {}
  comm::StreamEventPtr record(Lane lane) override { return inner_->record(lane); }
  void wait(Lane lane, const comm::StreamEventPtr& event) override { inner_->wait(lane, event); }
  void synchronize(const comm::StreamEventPtr& event) override { inner_->synchronize(event); }

  void note(const std::string& what) override { inner_->note(what); }

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
  where_ = std::move(where);
  returns_moments_ = moments;
  moments_.assign(1, "the forward");
  moment_ = 0;
}

/// Determines the phase of the step that runs now. Autograd tells whether a backward runs; gradient
/// clipping and optimizer steps are recognized by their CallerScope.
void MemoryLog::update_phase() {
  if (phase_ == MemoryPhase::kSetup || phase_ == MemoryPhase::kUpdate) {
    return;
  }
  MemoryPhase now =
      tessera::detail::backward_id() >= 0 ? MemoryPhase::kBackward : MemoryPhase::kForward;
  const std::string_view caller = comm::CallerScope::outermost();
  if (caller == "clip_grad_norm_" || caller == "unscale_" || caller == "optimizer step") {
    now = MemoryPhase::kUpdate;
  }
  phases_ += now == phase_ ? 0 : 1;
  phase_ = now;
}

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

/// Records an allocation or a free. Takes a lock, because the thread that prefetches batches also
/// allocates memory.
void MemoryLog::note(const TensorBlock& block) {
  const std::lock_guard lock(mutex_);
  const bool by_step = std::this_thread::get_id() == thread_;
  if (by_step) {
    update_phase();
  }
  if (block.freed) {
    const auto known = blocks_.find(block.number);
    if (known == blocks_.end()) {
      return;  // the block was allocated before the MemoryLog existed
    }
    known->second.ended = phases_;
    live_blocks_.erase(known->second.data);
    events_.push_back({block.number, true, moment_});
    return;
  }
  blocks_[block.number] = {.data = block.data,
                           .bytes = block.bytes,
                           .born = phase_,
                           .lane = by_step ? lane_ : Lane::kCompute,
                           .began = phases_,
                           .ended = std::numeric_limits<int>::max()};
  live_blocks_[block.data] = block.number;
  if (by_step && where_) {
    update_moment();
  }
  events_.push_back({block.number, false, moment_});
}

void MemoryLog::assign_parameter(const at::Tensor& tensor) {
  const void* data = tensor.const_data_ptr();
  const std::lock_guard lock(mutex_);
  const auto after = live_blocks_.upper_bound(data);
  if (data == nullptr || after == live_blocks_.begin()) {
    return;
  }
  const auto& [begin, number] = *std::prev(after);
  Block& block = blocks_.at(number);
  if (static_cast<const char*>(data) < static_cast<const char*>(begin) + block.bytes) {
    block.is_parameter = true;
  }
}

MemoryKind MemoryLog::kind_of(const Block& block) {
  if (block.earlier && block.born == MemoryPhase::kUpdate) {
    return MemoryKind::kOptimizer;
  }
  if (block.earlier && block.born == MemoryPhase::kBackward) {
    return MemoryKind::kGradients;
  }
  if (block.earlier) {
    // Shards that were allocated in the first forward are parameters. All other blocks from the
    // first forward that later steps use, such as masks, count as activations.
    return block.born == MemoryPhase::kForward && !block.is_parameter ? MemoryKind::kActivations
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

/// Replays the allocations and frees of the step, to find the memory use in each part of the step.
StepMemory MemoryLog::use(bool on_host) const {
  const std::lock_guard lock(mutex_);
  StepMemory memory;
  BytesByKind live{};
  std::int64_t sum = 0;  // bytes in use after the events so far, except offloaded memory
  const auto add = [&](const Block& block, std::int64_t sign) {
    const MemoryKind kind = kind_of(block);
    const auto at = static_cast<std::size_t>(kind);
    live[at] += sign * block.bytes;
    memory.most[at] = std::max(memory.most[at], live[at]);
    sum += on_host && is_state(kind) ? 0 : sign * block.bytes;
  };
  for (const auto& [number, block] : blocks_) {
    if (block.earlier) {
      add(block, 1);
    }
  }
  // For each part of the step: its maximum memory use, and the index of the event at this maximum.
  std::vector<std::pair<std::size_t, MomentMemory>> moments(moments_.size());
  for (std::size_t i = 0; i < events_.size(); ++i) {
    const Event& event = events_[i];
    if (const auto found = blocks_.find(event.number); found != blocks_.end()) {
      add(found->second, event.freed ? -1 : 1);
    }
    const std::string& moment = moments_[event.moment];
    if (auto& most = moments[event.moment]; !event.freed && sum > most.second.bytes) {
      most = {i, {moment, sum, live}};
    }
    if (sum > memory.peak_bytes) {
      memory.peak_bytes = sum;
      memory.at_peak = live;
      memory.peak_moment = moment;
    }
  }
  if (returns_moments_) {
    std::ranges::sort(moments, {}, &std::pair<std::size_t, MomentMemory>::first);
    for (auto& [event, most] : moments) {
      if (most.bytes > 0) {
        memory.moments.push_back(std::move(most));
      }
    }
  }
  return memory;
}

namespace {

/// The smallest block that mmap() reserves. For smaller blocks the heap is cheaper.
constexpr std::size_t kReserveFrom = std::size_t{1} << 16;

TensorMemoryOptions& counting_options() {
  static TensorMemoryOptions options;
  return options;
}

std::atomic<bool> counting = false;
std::atomic<std::int64_t> live = 0;
std::atomic<std::int64_t> highest = 0;
std::atomic<std::uint64_t> allocations = 0;

struct Counted {
  TensorBlock block;
  c10::DataPtr memory;             ///< the block's memory, if libtorch's allocator allocated it
  std::size_t reserved_bytes = 0;  ///< size of the block if mmap() allocated it, else 0
};

/// Allocated blocks by address, because libtorch's raw deallocation passes only the address.
struct Blocks {
  std::mutex mutex;
  std::unordered_map<void*, Counted> by_address;
};
/// The table of blocks is never destroyed, because tensors can outlive main().
Blocks& blocks() {
  static auto* const all = new Blocks();
  return *all;
}

void raise_highest(std::int64_t now) {
  std::int64_t before = highest.load();
  while (before < now && !highest.compare_exchange_weak(before, now)) {
  }
}

void tell(const TensorBlock& block) {
  if (counting_options().observer) {
    counting_options().observer(block);
  }
}

Counted take_block(void* data) {
  const std::lock_guard lock(blocks().mutex);
  const auto found = blocks().by_address.find(data);
  Counted counted = std::move(found->second);
  blocks().by_address.erase(found);
  return counted;
}

void free_counted(void* data) {
  if (data == nullptr) {
    return;
  }
  Counted counted = take_block(data);
  live -= counted.block.bytes;
  counted.block.freed = true;
  tell(counted.block);
  if (counted.reserved_bytes > 0) {
    munmap(data, counted.reserved_bytes);
  }
}

void* reserve(std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TESSERA_CHECK(memory != MAP_FAILED, "can't reserve ", bytes,
                " bytes of addresses for a tensor; use a smaller batch or shorter sequences, or "
                "raise the limit of virtual memory (ulimit -v)");
  return memory;
}

class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &free_counted, c10::Device(c10::kCPU)};
    }
    const TensorMemoryOptions& options = counting_options();
    const auto size = static_cast<std::int64_t>(bytes);
    Counted counted;
    counted.block = {++allocations,
                     (size + options.granularity - 1) / options.granularity * options.granularity,
                     false};
    const bool reserves = options.reserve_only && bytes >= kReserveFrom;
    counted.reserved_bytes = reserves ? bytes : 0;
    counted.memory = reserves ? c10::DataPtr() : inner_->allocate(bytes);
    void* const data = reserves ? reserve(bytes) : counted.memory.get();
    counted.block.data = data;
    const TensorBlock block = counted.block;
    {
      const std::lock_guard lock(blocks().mutex);
      blocks().by_address.emplace(data, std::move(counted));
    }
    raise_highest(live += block.bytes);
    tell(block);
    return {data, data, &free_counted, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  c10::Allocator* inner_;
};

}  // namespace

void count_tensor_memory() {
  count_tensor_memory(TensorMemoryOptions{});
}

void count_tensor_memory(TensorMemoryOptions options) {
  counting_options() = std::move(options);
  if (counting.exchange(true)) {
    return;
  }
  // The counting allocator is never destroyed, because tensors can outlive main().
  static auto* const allocator = new CountingAllocator(tessera::detail::cpu_allocator());
  tessera::detail::set_cpu_allocator(allocator);
}

std::optional<std::int64_t> tensor_bytes() {
  return counting ? std::optional(live.load()) : std::nullopt;
}

std::optional<std::int64_t> take_peak_tensor_bytes() {
  return counting ? std::optional(highest.exchange(live.load())) : std::nullopt;
}

}  // namespace tessera::observe
