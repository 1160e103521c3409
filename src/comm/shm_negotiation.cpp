#include "shm_negotiation.h"

#include <string>

#include "job_variables.h"
#include "process_identity.h"

namespace tessera::comm {
namespace {

constexpr auto kHandleKey = "handle";

std::optional<ShmSegment> reach_segment(c10d::Store& store, const GroupInfo& group) {
  const bool wanted = environment_variable("TESSERA_SHM") != "0";
  if (group.rank != 0) {
    return wanted ? ShmSegment::open(store.get_to_str(kHandleKey)) : std::nullopt;
  }
  auto segment = wanted ? ShmSegment::create(group.size()) : std::nullopt;
  store.set(kHandleKey, segment ? segment->handle() : "none");
  return segment;
}

/// True if every rank says `yes`.
bool all_say(c10d::Store& store, const GroupInfo& group, const std::string& question, bool yes) {
  store.set(question + std::to_string(group.rank), yes ? "yes" : "no");
  bool result = true;
  for (int rank = 0; rank < group.size(); ++rank) {
    result = store.get_to_str(question + std::to_string(rank)) == "yes" && result;
  }
  return result;
}

bool recognises_peers(const ShmSegment& segment, const GroupInfo& group) {
  for (int rank = 0; rank < group.size(); ++rank) {
    if (!is_alive(segment.process(rank))) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::optional<ShmSegment> negotiate_segment(c10d::Store& store, const GroupInfo& group) {
  std::optional<ShmSegment> segment = reach_segment(store, group);
  if (segment) {
    segment->set_process(group.rank, this_process());
  }
  // Peers can be recognised only once all of them have written who they are.
  const bool reached = all_say(store, group, "reached", segment.has_value());
  const bool recognised =
      all_say(store, group, "recognised", reached && recognises_peers(*segment, group));
  if (!recognised) {
    return std::nullopt;
  }
  segment->close_handle();
  return segment;
}

}  // namespace tessera::comm
