#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "record/record.h"
#include "runtime/runtime.h"

namespace fake_cuda {
namespace {

struct Block {
  std::size_t bytes;
  MemoryKind kind;
  int device;
  bool mapped;           ///< true: the fake allocated the memory; false: the program did
  void* view = nullptr;  ///< address for the fake's own accesses
};

struct Blocks {
  std::mutex mutex;
  std::map<std::uintptr_t, Block> by_address;
  std::map<int, std::int64_t> used;  ///< `used`: allocated bytes of each device
  std::int64_t mallocs = 0;
};

Blocks& blocks() {
  static auto* const once = new Blocks;
  return *once;
}

std::optional<Block> find(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  const std::lock_guard lock(blocks().mutex);
  auto after = blocks().by_address.upper_bound(address);
  if (after == blocks().by_address.begin()) {
    return std::nullopt;
  }
  --after;
  return address < after->first + after->second.bytes ? std::optional(after->second) : std::nullopt;
}

MemoryUse& use_of(MemoryKind kind) {
  return kind == MemoryKind::kDevice ? record().device_memory : record().pinned_memory;
}

void insert(void* pointer, const Block& block) {
  {
    const std::lock_guard lock(blocks().mutex);
    blocks().by_address[reinterpret_cast<std::uintptr_t>(pointer)] = block;
    if (block.kind == MemoryKind::kDevice) {
      blocks().used[block.device] += static_cast<std::int64_t>(block.bytes);
    }
  }
  const std::lock_guard lock(record().mutex);
  MemoryUse& use = use_of(block.kind);
  use.active += static_cast<std::int64_t>(block.bytes);
  ++use.allocations;
}

std::optional<Block> remove(void* pointer) {
  std::optional<Block> block;
  {
    const std::lock_guard lock(blocks().mutex);
    const auto found = blocks().by_address.find(reinterpret_cast<std::uintptr_t>(pointer));
    if (found == blocks().by_address.end()) {
      return std::nullopt;
    }
    block = found->second;
    blocks().by_address.erase(found);
    if (block->kind == MemoryKind::kDevice) {
      blocks().used[block->device] -= static_cast<std::int64_t>(block->bytes);
    }
  }
  const std::lock_guard lock(record().mutex);
  use_of(block->kind).active -= static_cast<std::int64_t>(block->bytes);
  return block;
}

void* map(std::size_t bytes, int protection, int flags, int file) {
  void* const pointer = mmap(nullptr, bytes, protection, flags | MAP_NORESERVE, file, 0);
  return pointer == MAP_FAILED ? nullptr : pointer;
}

constexpr int kReadWrite = PROT_READ | PROT_WRITE;

/// Allocates zeroed device memory and maps it at two addresses. The program gets `pointer`, which
/// the host may not access. The fake uses `view`.
void map_device(std::size_t bytes, void** pointer, void** view) {
  const int file = memfd_create("fake_cuda", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    return;
  }
  *view = map(bytes, kReadWrite, MAP_SHARED, file);
  *pointer = *view == nullptr ? nullptr : map(bytes, PROT_NONE, MAP_SHARED, file);
  close(file);
}

bool fits(std::size_t bytes) {
  const std::lock_guard lock(blocks().mutex);
  const std::int64_t number = ++blocks().mallocs;
  const auto size = static_cast<std::int64_t>(bytes);
  const auto first_failing = settings().fault("malloc");
  const bool failing = first_failing && number >= *first_failing;
  return !failing && size <= settings().fault("malloc-above").value_or(kDeviceBytes) &&
         blocks().used[current_device()] + size <= kDeviceBytes;
}

struct sigaction previous {};

constexpr char kWhat[] = "the host touches memory of a device";

/// Handles SIGSEGV. Calling kind_of() here locks a mutex. The handler cannot deadlock, because the
/// fake never accesses device memory while this mutex is locked.
void on_fault(int signal, siginfo_t* info, void*) {
  // After the handler, the faulting instruction runs again and the previous handler gets the fault.
  sigaction(signal, &previous, nullptr);
  if (kind_of(info->si_addr) != MemoryKind::kDevice) {
    return;
  }
  count_violation(kWhat);
  static_cast<void>(write(STDERR_FILENO, "fake CUDA: ", std::strlen("fake CUDA: ")));
  static_cast<void>(write(STDERR_FILENO, kWhat, std::strlen(kWhat)));
  static_cast<void>(write(STDERR_FILENO, "\n", 1));
  write_reports();
}

/// Installs a handler that reports host accesses to device memory, which end the process.
void watch_host_access() {
  static const int once = [] {
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    return sigaction(SIGSEGV, &action, &previous);
  }();
  static_cast<void>(once);
}

cudaError_t allocate(void** pointer, std::size_t bytes, MemoryKind kind) {
  use_device();
  *pointer = nullptr;
  if (bytes == 0) {
    return cudaSuccess;
  }
  void* view = nullptr;
  if (kind == MemoryKind::kDevice) {
    watch_host_access();
    map_device(bytes, pointer, &view);
  } else {
    *pointer = map(bytes, kReadWrite, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  }
  if (*pointer == nullptr) {
    return cudaErrorMemoryAllocation;
  }
  insert(*pointer, {bytes, kind, current_device(), /*mapped=*/true, view});
  return cudaSuccess;
}

/// Waits for all streams before freeing the memory, as CUDA does.
cudaError_t release(void* pointer) {
  if (pointer == nullptr) {
    return cudaSuccess;
  }
  wait_for_all_streams();
  const std::optional<Block> block = remove(pointer);
  if (!block) {
    count_violation("memory is freed that was not allocated");
    return cudaErrorInvalidValue;
  }
  if (block->mapped) {
    munmap(pointer, block->bytes);
  }
  if (block->view != nullptr) {
    munmap(block->view, block->bytes);
  }
  return cudaSuccess;
}

}  // namespace

MemoryKind kind_of(const void* address) {
  const std::optional<Block> block = find(address);
  return block ? block->kind : MemoryKind::kPageable;
}

std::size_t bytes_from(const void* address) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const std::lock_guard lock(blocks().mutex);
  auto block = blocks().by_address.upper_bound(begin);
  if (block == blocks().by_address.begin()) {
    return 0;
  }
  --block;
  return block->first + std::max(block->second.bytes, begin - block->first) - begin;
}

void* view_of(const void* address) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const std::lock_guard lock(blocks().mutex);
  auto block = blocks().by_address.upper_bound(begin);
  const bool inside = block != blocks().by_address.begin() &&
                      begin < (--block)->first + block->second.bytes &&
                      block->second.view != nullptr;
  return inside ? static_cast<std::byte*>(block->second.view) + (begin - block->first)
                : const_cast<void*>(address);
}

int device_of(const void* address) {
  const std::optional<Block> block = find(address);
  return block ? block->device : 0;
}

}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  count_call("cudaMalloc");
  return fits(bytes) ? allocate(pointer, bytes, MemoryKind::kDevice) : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void* pointer) {
  count_call("cudaFree");
  return release(pointer);
}

cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  count_call("cudaHostAlloc");
  return allocate(pointer, bytes, MemoryKind::kPinned);
}

cudaError_t cudaMallocHost(void** pointer, std::size_t bytes) {
  return cudaHostAlloc(pointer, bytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void* pointer) {
  count_call("cudaFreeHost");
  return release(pointer);
}

cudaError_t cudaHostRegister(void* pointer, std::size_t bytes, unsigned) {
  count_call("cudaHostRegister");
  insert(pointer, {bytes, MemoryKind::kPinned, current_device(), /*mapped=*/false});
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* pointer) {
  count_call("cudaHostUnregister");
  return remove(pointer) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  count_call("cudaMemGetInfo");
  const std::lock_guard lock(blocks().mutex);
  *total = static_cast<std::size_t>(kDeviceBytes);
  *free = *total - static_cast<std::size_t>(blocks().used[current_device()]);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  auto* const address = const_cast<void*>(pointer);
  switch (kind_of(pointer)) {
    case MemoryKind::kPageable:
      attributes->type = cudaMemoryTypeUnregistered;
      break;
    case MemoryKind::kPinned:
      attributes->type = cudaMemoryTypeHost;
      attributes->hostPointer = attributes->devicePointer = address;
      break;
    case MemoryKind::kDevice:
      attributes->type = cudaMemoryTypeDevice;
      attributes->device = device_of(pointer);
      attributes->devicePointer = address;
      break;
  }
  return cudaSuccess;
}

}  // extern "C"

namespace fake_cuda {
namespace {

constexpr std::size_t kVariableBytes = std::size_t{1} << 20;

std::string direction(const void* to, const void* from) {
  const auto name = [](const void* address) {
    switch (kind_of(address)) {
      case MemoryKind::kDevice:
        return "device";
      case MemoryKind::kPinned:
        return "pinned";
      default:
        return "pageable";
    }
  };
  return std::string(name(from)) + " to " + name(to);
}

void count_copy(const Stream& stream, const void* to, const void* from) {
  const std::string call = "cudaMemcpyAsync " + direction(to, from);
  const std::lock_guard lock(record().mutex);
  ++record().calls[call];
  ++record().streams[stream.id()].copies;
}

/// Copies pageable host memory before the call returns, because the program can free it later.
std::shared_ptr<std::vector<std::byte>> staged(const void* from, std::size_t bytes) {
  const auto* const first = static_cast<const std::byte*>(from);
  return std::make_shared<std::vector<std::byte>>(first, first + bytes);
}

cudaError_t copy(void* to, const void* from, std::size_t bytes, Stream& stream) {
  if (kind_of(from) == MemoryKind::kPageable) {
    stream.submit(
        [=, source = staged(from, bytes)] { std::memcpy(view_of(to), source->data(), bytes); });
    return cudaSuccess;
  }
  stream.submit([=] { std::memmove(view_of(to), view_of(from), bytes); });
  if (kind_of(to) == MemoryKind::kPageable) {
    // As in CUDA, a copy to pageable memory returns only after all bytes are copied.
    stream.mark()->wait();
  }
  return cudaSuccess;
}

}  // namespace
}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t handle) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  count_copy(*stream, to, from);
  return copy(to, from, bytes, *stream);
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  count_host_sync("cudaMemcpy");
  find_stream(nullptr)->mark()->wait();
  return error;
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes,
                                cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t handle) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  count_call("cudaMemsetAsync");
  stream->submit([=] { std::memset(view_of(to), value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);
}

// Writes nothing: kernels that would read device variables are not computed.
cudaError_t cudaMemcpyToSymbol(const void*, const void*, std::size_t, std::size_t, cudaMemcpyKind) {
  count_call("cudaMemcpyToSymbol");
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static auto* const variable = new std::byte[kVariableBytes]();
  *address = variable;
  return cudaSuccess;
}

}  // extern "C"
