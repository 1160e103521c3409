#include "runtime/limits.h"

#include <string>

#include "record/call_stack.h"
#include "record/record.h"

namespace fake_cuda {
namespace {

constexpr std::uint64_t kThreads = 1024;  ///< the most in a block
constexpr unsigned kBlockZ = 64;
constexpr unsigned kGridX = 2147483647;
constexpr unsigned kGridYZ = 65535;

thread_local cudaError_t last_error = cudaSuccess;

std::uint64_t product(const dim3& size) {
  return std::uint64_t{size.x} * size.y * size.z;
}

std::string text(const dim3& size) {
  return std::to_string(size.x) + "x" + std::to_string(size.y) + "x" + std::to_string(size.z);
}

bool fits(const LaunchSizes& sizes) {
  const dim3& grid = sizes.grid;
  const dim3& block = sizes.block;
  return product(grid) > 0 && grid.x <= kGridX && grid.y <= kGridYZ && grid.z <= kGridYZ &&
         product(block) > 0 && product(block) <= kThreads && block.z <= kBlockZ;
}

}  // namespace

cudaError_t check_launch(const char* kernel, const LaunchSizes& sizes, std::size_t shared_limit) {
  if (!fits(sizes)) {
    return refuse_launch("a launch of " + text(sizes.grid) + " blocks of " + text(sizes.block) +
                             " threads: " + demangle(kernel),
                         cudaErrorInvalidConfiguration);
  }
  if (sizes.shared_bytes > shared_limit) {
    return refuse_launch("a launch with " + std::to_string(sizes.shared_bytes) +
                             " bytes of shared memory, of " + std::to_string(shared_limit) +
                             " that the kernel may have: " + demangle(kernel),
                         cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

cudaError_t refuse_launch(const std::string& what, cudaError_t error) {
  count_violation(what);
  last_error = error;
  return error;
}

cudaError_t last_launch_error() {
  return last_error;
}

void clear_launch_error() {
  last_error = cudaSuccess;
}

}  // namespace fake_cuda
