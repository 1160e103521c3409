// NCCL's element types and reductions, on the host.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <string>
#include <vector>

namespace fake_cuda {

std::size_t bytes_of(ncclDataType_t type);
std::string name_of(ncclDataType_t type);

/// True for the reductions that reduce() knows.
bool can_reduce(ncclDataType_t type, ncclRedOp_t op);

/// output[i] = op over the inputs[r][i], in the order of ranks. `output` may be one of the inputs.
void reduce(void* output, const std::vector<const void*>& inputs, std::size_t count,
            ncclDataType_t type, ncclRedOp_t op);

/// A sum of elements that are first multiplied by `factor`.
ncclRedOp_t make_scaled_sum(double factor);

/// The number of type `type` at `address`.
double number_at(const void* address, ncclDataType_t type);

}  // namespace fake_cuda
