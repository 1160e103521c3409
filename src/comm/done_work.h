#pragma once

#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// The Work of a collective that was complete when its call returned.
class DoneWork final : public Work {
 public:
  void wait() override {}
};

/// One object for all of them: it has no state.
inline WorkPtr done_work() {
  static const WorkPtr done = std::make_shared<DoneWork>();
  return done;
}

}  // namespace tessera::comm
