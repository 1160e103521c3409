// What a card refuses of the addresses that a kernel is given.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

namespace fake_cuda {

/// Bytes of a kernel's argument whose addresses the kernel reads and writes by 16 bytes: a fused
/// kernel of Tessera (src/kernels/device) that takes more than one element at a time. 0 for others.
std::size_t bytes_of_vector_call(const std::string& kernel);

/// cudaSuccess where each address of a device among the argument's bytes is a multiple of 16; else
/// what refuse_launch returns. On a card the kernel fails.
cudaError_t check_vector_call(const char* kernel, const void* argument, std::size_t bytes);

}  // namespace fake_cuda
