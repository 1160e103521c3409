#pragma once

#include <cstddef>
#include <numeric>
#include <vector>

#include "tessera/core/detail/flight_record.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// Notes that this thread makes progress with work on files. Ranks that wait for its next
/// collective count their time-out and the watchdog's limit from then on: so a slow disk does not
/// count as a hang, and a disk that hangs still does. On other hosts a note of any rank counts, a
/// second later. To be called after each piece of some MiB; the thread's next collective ends it.
/// Does nothing in a thread without collectives. Takes less than a microsecond; not collective.
void note_progress(flight::Work work);

/// A thread that communicates, as the flight records of its ranks list it.
class ListedThread;

/// The calling thread, or the one that it works for.
const ListedThread& listed_thread();

/// While it exists, note_progress() on this thread counts for another thread, which has distributed
/// its work and waits for it. That one must neither end nor communicate meanwhile.
class WorkFor {
 public:
  explicit WorkFor(const ListedThread& thread);
  WorkFor(const WorkFor&) = delete;
  WorkFor& operator=(const WorkFor&) = delete;
  ~WorkFor();

 private:
  const ListedThread* before_;
};

/// All ranks of a world of this size, in order.
inline std::vector<int> ranks_of_world(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// Shows this thread's warnings as those of the rank's main thread: in one line, once a job.
/// libtorch's warning handler is per thread, so each thread of the library that may warn calls this
/// first. Does nothing where the process has not called world_from_environment(), or the thread has
/// its own handler.
void take_warnings_of_thread();

}  // namespace tessera::comm
TESSERA_API_END
