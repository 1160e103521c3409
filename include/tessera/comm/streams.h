#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// A queue of work on a device; FSDP needs these four. Work within a lane runs in order; lanes run
/// concurrently. kAllReduce: for what a user's all-reduce hook does with reduced gradients while
/// the next reduce-scatter runs.
enum class Lane : std::uint8_t { kCompute, kAllGather, kReduceScatter, kAllReduce };
/// "compute", "all_gather", "reduce_scatter" or "all_reduce".
const char* to_string(Lane lane);

/// A point in a lane's work, to wait for. CUDA: an event.
class StreamEvent {
 public:
  virtual ~StreamEvent() = default;
};
/// nullptr: a point that has passed.
using StreamEventPtr = std::shared_ptr<StreamEvent>;

/// The streams of a device, on which communication overlaps with computation. The compute lane is
/// the stream that is current outside of any LaneScope.
///
/// Memory belongs to the lane in which it was allocated. Memory that another lane has used may be
/// freed only after the owning lane has waited for an event of that lane: nothing relies on
/// record_stream. Thread safety: one thread at a time, as forward and the backward that it waits
/// for; a thread that comes while another is in a LaneScope gets an Error.
class Streams {
 public:
  virtual ~Streams() = default;
  /// An event after all work that was issued to `lane` so far.
  virtual StreamEventPtr record(Lane lane) = 0;
  /// Work issued to `lane` from now on starts after `event`. Does not block the caller.
  virtual void wait(Lane lane, const StreamEventPtr& event) = 0;
  /// Blocks the caller until `event`.
  virtual void synchronize(const StreamEventPtr& event) = 0;
  /// A named mark in the order of the calls, for profilers and tests.
  virtual void note(const std::string& what) { static_cast<void>(what); }
  /// The next communication in `lane` is for `unit`, as messages name it. A mark by default:
  /// "all_gather unit 'x'". What forwards to other lanes forwards this, too.
  virtual void begin_unit(Lane lane, const std::string& unit) {
    note(to_string(lane) + (" " + unit));
  }

  /// `after` waits for all that was issued to `before`.
  void order(Lane before, Lane after) { wait(after, record(before)); }

 private:
  friend class LaneScope;
  /// What the caller issues goes to `lane`, until leave().
  virtual void enter(Lane lane) = 0;
  virtual void leave() = 0;
  /// Throws Error if a scope is open.
  void begin_scope(Lane lane);
  void end_scope();

  std::atomic<bool> in_scope_{false};
};
/// Shared by all that issue work to the same lanes.
using StreamsPtr = std::shared_ptr<Streams>;

/// Work that this thread issues in the scope goes to a lane. Scopes do not nest.
class LaneScope {
 public:
  LaneScope(Streams& streams, Lane lane) : streams_(streams) { streams_.begin_scope(lane); }
  LaneScope(const LaneScope&) = delete;
  LaneScope& operator=(const LaneScope&) = delete;
  ~LaneScope() { streams_.end_scope(); }

 private:
  Streams& streams_;
};

/// The lanes of a device. CPU: work is done when the call returns, so nothing is waited for. CUDA:
/// streams of that GPU (without an index: the calling thread's), of high priority except for
/// kAllReduce. Throws Error if CUDA cannot be used.
StreamsPtr make_streams(c10::Device device);
/// Lanes that make_streams() returns on the CPU from now on, in this process, to follow where work
/// is issued; nullptr: the default ones again.
void set_host_streams(StreamsPtr streams);

}  // namespace tessera::comm
TESSERA_API_END
