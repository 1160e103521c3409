#include "runtime/vector_access.h"

#include <cstddef>
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

using Offsets = std::vector<std::size_t>;

Offsets offsets_of_rotary() {
  Offsets offsets{offsetof(Rotary, cos), offsetof(Rotary, sin)};
  for (std::size_t part = 0; part < kMostRotaryParts; ++part) {
    const std::size_t begin = offsetof(Rotary, parts) + part * sizeof(RotaryHeads);
    offsets.push_back(begin + offsetof(RotaryHeads, x));
    offsets.push_back(begin + offsetof(RotaryHeads, out));
  }
  return offsets;
}

/// Where in the structures by which kernels get their addresses those are that they read and write
/// by vectors.
const std::map<std::string, Offsets>& calls() {
  static const std::map<std::string, Offsets> once{
      {"silu_mul_kernel", {offsetof(SiluMul, gate), offsetof(SiluMul, up), offsetof(SiluMul, out)}},
      {"silu_mul_backward_kernel",
       {offsetof(SiluMulBackward, forward.gate), offsetof(SiluMulBackward, forward.up),
        offsetof(SiluMulBackward, grad), offsetof(SiluMulBackward, gate_grad),
        offsetof(SiluMulBackward, up_grad)}},
      {"rms_norm_kernel",
       {offsetof(RmsNorm, x), offsetof(RmsNorm, residual), offsetof(RmsNorm, weight),
        offsetof(RmsNorm, sum), offsetof(RmsNorm, out)}},
      {"rms_norm_backward_kernel",
       {offsetof(RmsNormBackward, forward.x), offsetof(RmsNormBackward, forward.weight),
        offsetof(RmsNormBackward, grad), offsetof(RmsNormBackward, sum_grad),
        offsetof(RmsNormBackward, x_grad)}},
      {"rotary_kernel", offsets_of_rotary()}};
  return once;
}

}  // namespace

std::vector<std::size_t> addresses_of_vector_call(const std::string& kernel) {
  // libtorch registers thousands of kernels, and demangling takes time.
  if (kernel.find("7tessera") == std::string::npos) {
    return {};
  }
  const std::string name = demangle(kernel.c_str());
  // The first number among the template's arguments is that of the elements at a time.
  static const std::regex pattern(R"(::(\w+)<[^<>]*?, (\d+))");
  std::smatch found;
  if (!std::regex_search(name, found, pattern) || found[2] == "1") {
    return {};
  }
  const auto call = calls().find(found[1]);
  return call == calls().end() ? Offsets{} : call->second;
}

cudaError_t check_vector_call(const char* kernel, const void* argument,
                              const std::vector<std::size_t>& offsets) {
  for (const std::size_t offset : offsets) {
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
