#pragma once

#include <string>
#include <utility>

#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/streams.h"
#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// While a LaneScope exists, device work that this thread issues runs in the given lane (a stream;
/// see Lane in streams.h). Scopes do not nest.
class LaneScope : tessera::detail::NoCopy {
 public:
  LaneScope(Streams& streams, Lane lane) : streams_(streams) { streams_.begin_scope(lane); }
  ~LaneScope() { streams_.end_scope(); }

 private:
  Streams& streams_;
};

/// Sets the streams that make_streams() returns for the CPU in this process, for example to record
/// the stream in which work is issued. nullptr restores the default streams.
void set_host_streams(StreamsPtr streams);

/// While a PurposeScope exists, the collectives of a process group have a purpose, a string for
/// messages (Communicator::set_purpose).
class PurposeScope : tessera::detail::NoCopy {
 public:
  PurposeScope(Communicator& group, std::string purpose) : group_(group) {
    group_.set_purpose(std::move(purpose));
  }
  ~PurposeScope() { group_.set_purpose({}); }

 private:
  Communicator& group_;
};

}  // namespace tessera::comm
TESSERA_API_END
