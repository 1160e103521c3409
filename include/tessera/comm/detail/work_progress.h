#pragma once

#include "tessera/core/detail/flight_record.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// Says that this thread gets on with work on files. Ranks that wait for its next collective count
/// their time-out and the watchdog's limit from then on: so a rank with a slow disk is not taken
/// for one that hangs, and one whose disk hangs still is. On other hosts any rank's word counts, a
/// second later. To be called after each piece of some MiB; the thread's next collective ends it.
/// Does nothing in a thread without collectives. Takes less than a microsecond; not collective.
void note_progress(flight::Work work);

/// A thread that communicates, as the flight records of its ranks list it.
class ListedThread;

/// The calling thread, or the one that it works for.
const ListedThread& listed_thread();

/// While it exists, note_progress() on this thread speaks for another: for a thread that shares its
/// work out and waits until that is done. That one must neither end nor communicate meanwhile.
class WorkFor {
 public:
  explicit WorkFor(const ListedThread& thread);
  WorkFor(const WorkFor&) = delete;
  WorkFor& operator=(const WorkFor&) = delete;
  ~WorkFor();

 private:
  const ListedThread* before_;
};

}  // namespace tessera::comm
TESSERA_API_END
