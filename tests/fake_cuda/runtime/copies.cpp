// cudaMemcpy* and cudaMemset*: they move real bytes, in the order of their streams.
#include <cuda_runtime_api.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "record/record.h"
#include "runtime/capture.h"
#include "runtime/memory.h"
#include "runtime/stream.h"

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

/// Pageable memory of the host is read before the call returns: it may be gone afterwards.
std::shared_ptr<std::vector<std::byte>> staged(const void* from, std::size_t bytes) {
  const auto* const first = static_cast<const std::byte*>(from);
  return std::make_shared<std::vector<std::byte>>(first, first + bytes);
}

cudaError_t copy(void* to, const void* from, std::size_t bytes, Stream& stream) {
  if (kind_of(from) == MemoryKind::kPageable) {
    enqueue(stream, [=, source = staged(from, bytes)](Stream& on) {
      on.submit([=] { std::memcpy(view_of(to), source->data(), bytes); });
    });
    return cudaSuccess;
  }
  enqueue(stream,
          [=](Stream& on) { on.submit([=] { std::memmove(view_of(to), view_of(from), bytes); }); });
  if (kind_of(to) == MemoryKind::kPageable) {
    // The driver does not return from such a copy before it is done.
    if (forbidden_by_capture("cudaMemcpyAsync to pageable memory", stream.capture)) {
      return cudaErrorStreamCaptureUnsupported;
    }
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
  if (forbidden_by_capture("cudaMemcpy")) {
    return cudaErrorStreamCaptureUnsupported;
  }
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
  enqueue(*stream, [=](Stream& on) { on.submit([=] { std::memset(view_of(to), value, bytes); }); });
  return cudaSuccess;
}

cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  if (forbidden_by_capture("cudaMemset")) {
    return cudaErrorStreamCaptureUnsupported;
  }
  return cudaMemsetAsync(to, value, bytes, nullptr);
}

// Kernels do not run, so what they would read in a variable of the device does not matter.
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
