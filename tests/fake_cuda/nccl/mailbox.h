// How the ranks of a communicator, processes or threads of one host, pass bytes to each other.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

namespace fake_cuda {

/// A queue of bytes for each pair of ranks, in shared memory.
class Mailbox {
 public:
  /// Waits for all ranks. Null if they do not come within `patience`.
  static std::shared_ptr<Mailbox> open(const std::string& id, int rank, int ranks,
                                       std::chrono::milliseconds patience);

  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;
  ~Mailbox();

  /// How many bytes fit in the queue to `rank`, and are in it now.
  std::size_t push(int rank, const std::byte* data, std::size_t bytes);

  /// How many bytes were there from `rank`, and are in `data` now.
  std::size_t pull(int rank, std::byte* data, std::size_t bytes);

 private:
  struct Queue;
  struct Segment;

  Mailbox(Segment* segment, int rank, int ranks);
  Queue& queue(int from, int to);

  Segment* const segment_;
  const int rank_;
  const int ranks_;
};

/// For loops that wait for another rank: gives the core away, and later sleeps.
class Backoff {
 public:
  void pause();
  void reset() { idle_ = 0; }

 private:
  int idle_ = 0;
};

}  // namespace fake_cuda
