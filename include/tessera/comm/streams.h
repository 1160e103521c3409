#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace tessera::comm {

/// A queue of work on a device. Work within a lane runs in order; lanes run beside each other.
/// kAllReduce: for what a caller does with reduced gradients beside the next reduction.
enum class Lane : std::uint8_t { kCompute, kAllGather, kReduceScatter, kAllReduce };
const char* to_string(Lane lane);

/// A point in a lane's work.
class StreamEvent {
 public:
  virtual ~StreamEvent() = default;
};
/// nullptr: a point that has passed already.
using StreamEventPtr = std::shared_ptr<StreamEvent>;

/// The streams of a device on which communication runs beside computation. The compute lane is
/// whatever stream is current where no LaneScope is.
///
/// Memory belongs to the lane in which it was allocated: what another lane has used may be freed
/// only after the owner waits for an event of the user. Nothing relies on record_stream.
class Streams {
 public:
  virtual ~Streams() = default;
  /// The end of what was issued to `lane` so far.
  virtual StreamEventPtr record(Lane lane) = 0;
  /// What is issued to `lane` from now on starts after `event`. Does not block the caller.
  virtual void wait(Lane lane, const StreamEventPtr& event) = 0;
  /// Blocks the caller until `event`.
  virtual void synchronize(const StreamEventPtr& event) = 0;
  /// A mark for profilers and tests, in the order of the calls.
  virtual void note(const std::string& what) { static_cast<void>(what); }

  /// `after` waits for all that was issued to `before`.
  void order(Lane before, Lane after) { wait(after, record(before)); }

 private:
  friend class LaneScope;
  /// What the caller issues goes to `lane`, until leave().
  virtual void enter(Lane lane) = 0;
  virtual void leave() = 0;
};
using StreamsPtr = std::shared_ptr<Streams>;

/// What this thread issues within goes to a lane. Not nested.
class LaneScope {
 public:
  LaneScope(Streams& streams, Lane lane) : streams_(streams) { streams_.enter(lane); }
  LaneScope(const LaneScope&) = delete;
  LaneScope& operator=(const LaneScope&) = delete;
  ~LaneScope() { streams_.leave(); }

 private:
  Streams& streams_;
};

/// For "cpu", where work is done when the call returns: nothing is ever waited for. For "cuda":
/// streams of the current device, of high priority but for kAllReduce. Throws Error if CUDA cannot
/// be used.
StreamsPtr make_streams(const std::string& device_type);

}  // namespace tessera::comm
