#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// A lane is a queue of work on a device, on CUDA a stream. FSDP uses four lanes. Work within a
/// lane runs in order. Different lanes run concurrently. kAllReduce is for the work of a user's
/// all-reduce hook, which may overlap the next reduce-scatter.
enum class Lane : std::uint8_t { kCompute, kAllGather, kReduceScatter, kAllReduce };
/// The name of a lane: "compute", "all_gather", "reduce_scatter" or "all_reduce".
const char* to_string(Lane lane);

/// A point in the work of a lane, for which other work can wait; on CUDA, a CUDA event.
class StreamEvent {
 public:
  virtual ~StreamEvent() = default;
};
/// A shared pointer to a point in the work of a lane. nullptr is a point that has already passed.
using StreamEventPtr = std::shared_ptr<StreamEvent>;

/// The streams of a device, on which communication overlaps computation. A lane is a queue of work
/// (Lane). The compute lane is the current stream of libtorch.
///
/// Memory belongs to the lane in which it was allocated. Before memory that another lane has used
/// is freed, the lane of the memory must wait for an event of the other lane. record_stream is not
/// used. Thread safety: one thread at a time. For example, the thread of forward waits while the
/// thread of backward calls. A call while another thread has sent work to a lane throws Error.
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
  /// Sends the work that the caller issues from now on to `lane`, until leave() is called.
  virtual void enter(Lane lane) = 0;
  virtual void leave() = 0;
  /// Begins a scope of LaneScope. Throws Error if another scope is open.
  void begin_scope(Lane lane);
  void end_scope();

  std::atomic<bool> in_scope_{false};
};
/// A shared pointer to the streams of a device, for all code that issues work to the same lanes.
using StreamsPtr = std::shared_ptr<Streams>;

/// The streams of a device. CPU: work is done when the call returns, so no wait is needed. CUDA:
/// streams of that GPU (without an index, of the calling thread's GPU), with high priority except
/// for kAllReduce. Throws Error if CUDA cannot be used.
StreamsPtr make_streams(c10::Device device);

}  // namespace tessera::comm
TESSERA_API_END
