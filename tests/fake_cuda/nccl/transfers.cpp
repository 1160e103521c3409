#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <type_traits>

#include "nccl/nccl.h"
#include "record/record.h"

namespace fake_cuda {

constexpr std::size_t kCapacity = std::size_t{64} << 10;

/// A byte queue with one writer and one reader. `written` and `read`: bytes since the start.
struct Mailbox::Queue {
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> read;
  alignas(64) std::array<std::byte, kCapacity> bytes;
};

/// The shared memory of all queues. Linux zeroes the memory, so that all queues begin empty.
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

namespace {

/// Calls ROW(type, C++ type, name) for each type that reductions support.
#define FAKE_NCCL_TYPES(ROW)               \
  ROW(ncclInt8, std::int8_t, "int8")       \
  ROW(ncclUint8, std::uint8_t, "uint8")    \
  ROW(ncclInt32, std::int32_t, "int32")    \
  ROW(ncclUint32, std::uint32_t, "uint32") \
  ROW(ncclInt64, std::int64_t, "int64")    \
  ROW(ncclUint64, std::uint64_t, "uint64") \
  ROW(ncclFloat16, __half, "fp16")         \
  ROW(ncclBfloat16, __nv_bfloat16, "bf16") \
  ROW(ncclFloat32, float, "fp32")          \
  ROW(ncclFloat64, double, "fp64")

template <class Use>
bool with_type(ncclDataType_t type, Use&& use) {
  switch (type) {
#define FAKE_NCCL_CASE(NUMBER, T, NAME) \
  case NUMBER:                          \
    use(static_cast<T*>(nullptr));      \
    return true;
    FAKE_NCCL_TYPES(FAKE_NCCL_CASE)
#undef FAKE_NCCL_CASE
    default:
      return false;
  }
}

/// fp16 and bf16 values are reduced in fp32 and rounded once.
template <class T>
using Sum = std::conditional_t<std::is_arithmetic_v<T>, T, float>;

template <class T, class Combine>
void combine(T* output, const std::vector<const void*>& inputs, std::size_t count,
             Combine&& combine_two, Sum<T> divisor = 1) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto element = [&](std::size_t rank) {
      return static_cast<Sum<T>>(static_cast<const T*>(inputs[rank])[i]);
    };
    Sum<T> sum = element(0);
    for (std::size_t rank = 1; rank < inputs.size(); ++rank) {
      sum = static_cast<Sum<T>>(combine_two(sum, element(rank)));
    }
    output[i] = static_cast<T>(static_cast<Sum<T>>(sum / divisor));
  }
}

template <class T>
void reduce_type(T* output, const std::vector<const void*>& inputs, std::size_t count,
                 ncclRedOp_t op) {
  const auto add = [](auto a, auto b) { return a + b; };
  switch (op) {
    case ncclAvg:
      return combine(output, inputs, count, add, static_cast<Sum<T>>(inputs.size()));
    case ncclProd:
      return combine(output, inputs, count, [](auto a, auto b) { return a * b; });
    case ncclMax:
      return combine(output, inputs, count, [](auto a, auto b) { return std::max(a, b); });
    case ncclMin:
      return combine(output, inputs, count, [](auto a, auto b) { return std::min(a, b); });
    default:
      return combine(output, inputs, count, add);
  }
}

}  // namespace

std::size_t bytes_of(ncclDataType_t type) {
  std::size_t bytes = 1;
  with_type(type, [&](auto* null) { bytes = sizeof(*null); });
  return bytes;
}

std::string name_of(ncclDataType_t type) {
  switch (type) {
#define FAKE_NCCL_NAME(NUMBER, T, NAME) \
  case NUMBER:                          \
    return NAME;
    FAKE_NCCL_TYPES(FAKE_NCCL_NAME)
#undef FAKE_NCCL_NAME
    default:
      return "fp8";
  }
}

bool can_reduce(ncclDataType_t type, ncclRedOp_t op) {
  return op < ncclNumOps && with_type(type, [](auto*) {});
}

void reduce(void* output, const std::vector<const void*>& inputs, std::size_t count,
            ncclDataType_t type, ncclRedOp_t op) {
  with_type(type, [&](auto* null) {
    reduce_type(static_cast<decltype(null)>(output), inputs, count, op);
  });
}

}  // namespace fake_cuda
