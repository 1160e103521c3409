#pragma once

#include <cstddef>
#include <numeric>
#include <vector>

#include "tessera/core/detail/flight_record.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// Records that this thread makes progress with files. Ranks that wait for this thread's next
/// collective count their time-out and the watchdog's limit from this moment, so that a slow disk
/// is not taken for a hang. Call it after each piece of some MiB; the thread's next collective ends
/// the effect. On other hosts a record of any rank has this effect, with a delay of a second. Does
/// nothing in a thread without collectives. Takes less than a microsecond; not collective.
void note_progress(flight::Work work);

/// A thread that calls collectives, as listed in the flight records.
class ListedThread;

/// The calling thread, or the thread that it works for (WorkFor).
const ListedThread& listed_thread();

/// While it exists, note_progress() on this thread counts for `thread`. `thread` must wait for this
/// thread and must neither end nor call collectives in this time.
class WorkFor {
 public:
  explicit WorkFor(const ListedThread& thread);
  WorkFor(const WorkFor&) = delete;
  WorkFor& operator=(const WorkFor&) = delete;
  ~WorkFor();

 private:
  const ListedThread* before_;
};

/// All ranks of a world of `size` ranks, in order.
inline std::vector<int> ranks_of_world(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// Shows this thread's warnings in the form of the rank's main thread: one line, each text once for
/// the whole job. libtorch's warning handler is per thread, so each thread of the library that may
/// warn calls this first. Does nothing before world_from_environment(), or if the thread has its
/// own handler.
void take_warnings_of_thread();

}  // namespace tessera::comm
TESSERA_API_END
