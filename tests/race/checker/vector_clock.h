#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::race {

/// A moment of one queue of work: how many operators it had begun.
struct Epoch {
  std::size_t queue = 0;
  std::uint64_t time = 0;
};

/// What a queue knows to be done, of each queue (Mattern 1989; Fidge 1988).
class VectorClock {
 public:
  void join(const VectorClock& other) {
    times_.resize(std::max(times_.size(), other.times_.size()));
    for (std::size_t queue = 0; queue < other.times_.size(); ++queue) {
      times_[queue] = std::max(times_[queue], other.times_[queue]);
    }
  }
  Epoch tick(std::size_t queue) {
    times_.resize(std::max(times_.size(), queue + 1));
    return {queue, ++times_[queue]};
  }
  bool knows(const Epoch& epoch) const {
    return epoch.queue < times_.size() && epoch.time <= times_[epoch.queue];
  }

 private:
  std::vector<std::uint64_t> times_;
};

}  // namespace tessera::race
