#include "runtime/vector_access.h"

#include <cstdint>
#include <cstring>
#include <map>
#include <regex>

#include "device/rms_norm.h"
#include "device/rotary.h"
#include "device/silu_mul.h"
#include "record/call_stack.h"
#include "runtime/limits.h"
#include "runtime/memory.h"

namespace fake_cuda {
namespace {

using namespace tessera::kernels;

/// The structures by which kernels get their addresses.
const std::map<std::string, std::size_t>& calls() {
  static const std::map<std::string, std::size_t> once{
      {"silu_mul_kernel", sizeof(SiluMul)},
      {"silu_mul_backward_kernel", sizeof(SiluMulBackward)},
      {"rms_norm_kernel", sizeof(RmsNorm)},
      {"rms_norm_backward_kernel", sizeof(RmsNormBackward)},
      {"rotary_kernel", sizeof(Rotary)}};
  return once;
}

}  // namespace

std::size_t bytes_of_vector_call(const std::string& kernel) {
  // libtorch registers thousands of kernels, and demangling takes time.
  if (kernel.find("7tessera") == std::string::npos) {
    return 0;
  }
  const std::string name = demangle(kernel.c_str());
  // The first number among the template's arguments is that of the elements at a time.
  static const std::regex pattern(R"(::(\w+)<[^<>]*?, (\d+))");
  std::smatch found;
  if (!std::regex_search(name, found, pattern) || found[2] == "1") {
    return 0;
  }
  const auto call = calls().find(found[1]);
  return call == calls().end() ? 0 : call->second;
}

cudaError_t check_vector_call(const char* kernel, const void* argument, std::size_t bytes) {
  for (std::size_t offset = 0; offset + sizeof(void*) <= bytes; offset += sizeof(void*)) {
    const void* address = nullptr;
    std::memcpy(&address, static_cast<const std::byte*>(argument) + offset, sizeof(address));
    if (reinterpret_cast<std::uintptr_t>(address) % kVectorBytes != 0 &&
        kind_of(address) == MemoryKind::kDevice) {
      return refuse_launch("a misaligned access of 16 bytes: " + demangle(kernel),
                           cudaErrorMisalignedAddress);
    }
  }
  return cudaSuccess;
}

}  // namespace fake_cuda
