#include "nccl/mailbox.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>

namespace fake_cuda {

constexpr std::size_t kCapacity = std::size_t{64} << 10;

/// One writer, one reader. Both count bytes since the beginning.
struct Mailbox::Queue {
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> read;
  alignas(64) std::array<std::byte, kCapacity> bytes;
};

/// Zeros, as the kernel hands it out, are its first state.
struct Mailbox::Segment {
  alignas(64) std::atomic<int> present;

  Queue* queues() { return reinterpret_cast<Queue*>(this + 1); }

  static std::size_t bytes(int ranks) {
    return sizeof(Segment) + sizeof(Queue) * static_cast<std::size_t>(ranks * ranks);
  }
};

std::shared_ptr<Mailbox> Mailbox::open(const std::string& id, int rank, int ranks,
                                       std::chrono::milliseconds patience) {
  const std::string name = "/tessera-fake-nccl-" + id;
  const std::size_t bytes = Segment::bytes(ranks);
  const int file = shm_open(name.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    return nullptr;
  }
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) {
    return nullptr;
  }
  std::shared_ptr<Mailbox> mailbox(new Mailbox(static_cast<Segment*>(memory), rank, ranks));
  std::atomic<int>& present = mailbox->segment_->present;
  const bool last = ++present == ranks;
  const auto deadline = std::chrono::steady_clock::now() + patience;
  Backoff backoff;
  while (present < ranks && std::chrono::steady_clock::now() < deadline) {
    backoff.pause();
  }
  const bool complete = present >= ranks;
  if (last || !complete) {
    shm_unlink(name.c_str());
  }
  return complete ? mailbox : nullptr;
}

Mailbox::Mailbox(Segment* segment, int rank, int ranks)
    : segment_(segment), rank_(rank), ranks_(ranks) {}

Mailbox::~Mailbox() {
  munmap(segment_, Segment::bytes(ranks_));
}

Mailbox::Queue& Mailbox::queue(int from, int to) {
  return segment_->queues()[from * ranks_ + to];
}

std::size_t Mailbox::push(int rank, const std::byte* data, std::size_t bytes) {
  Queue& to = queue(rank_, rank);
  const std::uint64_t written = to.written.load(std::memory_order_relaxed);
  const std::size_t room = kCapacity - (written - to.read.load(std::memory_order_acquire));
  const std::size_t count = std::min(bytes, room);
  const std::size_t at = written % kCapacity;
  const std::size_t before_end = std::min(count, kCapacity - at);
  std::memcpy(to.bytes.data() + at, data, before_end);
  std::memcpy(to.bytes.data(), data + before_end, count - before_end);
  to.written.store(written + count, std::memory_order_release);
  return count;
}

std::size_t Mailbox::pull(int rank, std::byte* data, std::size_t bytes) {
  Queue& from = queue(rank, rank_);
  const std::uint64_t read = from.read.load(std::memory_order_relaxed);
  const std::size_t there = from.written.load(std::memory_order_acquire) - read;
  const std::size_t count = std::min(bytes, there);
  const std::size_t at = read % kCapacity;
  const std::size_t before_end = std::min(count, kCapacity - at);
  std::memcpy(data, from.bytes.data() + at, before_end);
  std::memcpy(data + before_end, from.bytes.data(), count - before_end);
  from.read.store(read + count, std::memory_order_release);
  return count;
}

void Backoff::pause() {
  constexpr int kYields = 50;
  if (++idle_ < kYields) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

}  // namespace fake_cuda
