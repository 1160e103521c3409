#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// A queue of work on a device. FSDP needs four of them. Work within a lane runs in order;
/// different lanes run concurrently. kAllReduce is for the work of a user's all-reduce hook, which
/// may overlap the next reduce-scatter.
enum class Lane : std::uint8_t { kCompute, kAllGather, kReduceScatter, kAllReduce };
/// The lane's name: "compute", "all_gather", "reduce_scatter" or "all_reduce".
const char* to_string(Lane lane);

/// A point in a lane's work for which other work can wait; on CUDA, an event.
class StreamEvent {
 public:
  virtual ~StreamEvent() = default;
};
/// nullptr means a point that has already passed.
using StreamEventPtr = std::shared_ptr<StreamEvent>;

/// The streams of a device, on which communication overlaps computation. The compute lane is the
/// stream that is current outside of any LaneScope.
///
/// Memory belongs to the lane in which it was allocated. Memory that another lane has used may be
/// freed only after the owning lane has waited for an event of that other lane; record_stream is
/// not used. Thread safety: one thread at a time, such as the thread of forward and then the thread
/// of backward while forward's thread waits. A call while another thread is in a LaneScope throws
/// Error.
class Streams {
 public:
  virtual ~Streams() = default;
  /// An event after all work that was issued to `lane` so far.
  virtual StreamEventPtr record(Lane lane) = 0;
  /// Makes work that is issued to `lane` from now on start after `event`. Does not block the
  /// caller.
  virtual void wait(Lane lane, const StreamEventPtr& event) = 0;
  /// Blocks the caller until `event` has passed.
  virtual void synchronize(const StreamEventPtr& event) = 0;
  /// Records a named mark in the order of the calls, for profilers and tests.
  virtual void note(const std::string& what) { static_cast<void>(what); }

  /// Makes `after` wait for all work that was issued to `before`.
  void order(Lane before, Lane after) { wait(after, record(before)); }

 private:
  friend class LaneScope;
  /// Sends the work that the caller issues to `lane`, until leave().
  virtual void enter(Lane lane) = 0;
  virtual void leave() = 0;
  /// Throws Error if a scope is open.
  void begin_scope(Lane lane);
  void end_scope();

  std::atomic<bool> in_scope_{false};
};
/// Streams, shared by all code that issues work to the same lanes.
using StreamsPtr = std::shared_ptr<Streams>;

/// Sends work that this thread issues in the scope to a lane. Scopes do not nest.
class LaneScope {
 public:
  LaneScope(Streams& streams, Lane lane) : streams_(streams) { streams_.begin_scope(lane); }
  LaneScope(const LaneScope&) = delete;
  LaneScope& operator=(const LaneScope&) = delete;
  ~LaneScope() { streams_.end_scope(); }

 private:
  Streams& streams_;
};

/// The lanes of a device. CPU: work is done when the call returns, so no wait is needed. CUDA:
/// streams of that GPU (without an index, of the calling thread's GPU), with high priority except
/// for kAllReduce. Throws Error if CUDA cannot be used.
StreamsPtr make_streams(c10::Device device);
/// Sets the lanes that make_streams() returns for the CPU in this process, for example to record
/// where work is issued. nullptr restores the default lanes.
void set_host_streams(StreamsPtr streams);

}  // namespace tessera::comm
TESSERA_API_END
