#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "tessera/comm/streams.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// A lane is a queue of work on a device; on CUDA, a lane is a stream. Work within one lane runs in
/// order. Different lanes run concurrently.
enum class Lane : std::uint8_t { kCompute, kAllGather, kReduceScatter };
/// The name of a lane: "compute", "all_gather" or "reduce_scatter".
const char* to_string(Lane lane);

/// The streams (lanes) of a device. Communication and computation overlap on different lanes. The
/// compute lane is libtorch's current stream.
///
/// Memory belongs to the lane that allocated the memory. Before memory is freed, this lane must
/// wait for the work of all other lanes on the memory: record_stream is not used. A LaneScope
/// throws Error if another thread has a LaneScope.
class Streams {
 public:
  virtual ~Streams() = default;
  /// Returns an event that `lane` reaches after all work that has been issued to `lane` so far.
  virtual StreamEventPtr record(Lane lane) = 0;
  /// Makes work that is issued to `lane` from now on start after `event`. Does not block the
  /// caller.
  virtual void wait(Lane lane, const StreamEventPtr& event) = 0;
  /// Blocks the caller until the device has reached `event`.
  virtual void synchronize(const StreamEventPtr& event) = 0;
  /// Adds a named mark to the profile, for profilers and tests. On CUDA the mark is an NVTX mark.
  virtual void note(const std::string& what) { static_cast<void>(what); }

  /// Makes lane `after` wait for all work that was issued to lane `before`.
  void order(Lane before, Lane after) { wait(after, record(before)); }

 private:
  friend class LaneScope;
  /// From now until leave(), the caller's device work is issued to `lane`.
  virtual void enter(Lane lane) = 0;
  virtual void leave() = 0;
  /// Called by LaneScope. Throws Error if another LaneScope is open.
  void begin_scope(Lane lane);
  void end_scope();

  std::atomic<bool> in_scope_{false};
};
/// A shared pointer to the streams of a device. Several objects use the same streams.
using StreamsPtr = std::shared_ptr<Streams>;

/// Returns the streams of GPU `device`, with high priority. Without an index: the thread's current
/// GPU. On a CPU the streams do nothing. Throws Error if CUDA cannot be used.
StreamsPtr make_streams(c10::Device device);

}  // namespace tessera::comm
TESSERA_API_END
