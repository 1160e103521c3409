// What a card refuses of the addresses that a kernel is given.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <vector>

namespace fake_cuda {

/// Where in a kernel's argument the addresses are that it reads and writes by 16 bytes: of a fused
/// kernel of Tessera (src/kernels/device) that takes more than one element at a time.
std::vector<std::size_t> addresses_of_vector_call(const std::string& kernel);

/// cudaSuccess where each of these addresses of a device is a multiple of 16; else what
/// refuse_launch returns. On a card the kernel fails.
cudaError_t check_vector_call(const char* kernel, const void* argument,
                              const std::vector<std::size_t>& offsets);

}  // namespace fake_cuda
