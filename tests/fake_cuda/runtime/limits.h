// What an H200 refuses of a launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

namespace fake_cuda {

/// The dynamic shared memory of a block, without and with an attribute of the kernel.
constexpr std::size_t kSharedBytes = std::size_t{48} << 10;
constexpr std::size_t kSharedBytesOptIn = std::size_t{227} << 10;

struct LaunchSizes {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes = 0;
};

/// cudaSuccess where the launch may run, else what refuse_launch returns.
cudaError_t check_launch(const char* kernel, const LaunchSizes& sizes, std::size_t shared_limit);

/// Counts a violation. The error stays behind for cudaGetLastError(), where code after <<<...>>>
/// finds it, and is returned.
cudaError_t refuse_launch(const std::string& what, cudaError_t error);

/// The last error of a launch of this thread.
cudaError_t last_launch_error();
void clear_launch_error();

}  // namespace fake_cuda
