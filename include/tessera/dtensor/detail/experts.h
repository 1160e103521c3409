#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/comm/communicator.h"
#include "tessera/export.h"

/// Functions that call the operators of a mixture of experts (src/dtensor/fused/experts.cpp). The
/// operators have first-order gradients, but no double backward.
TESSERA_API_BEGIN
namespace tessera::detail {

/// Implements nn::all_to_all_uneven() for known `output_counts`. Collective over `group`.
at::Tensor all_to_all_uneven(const at::Tensor& x, c10::IntArrayRef output_counts,
                             c10::IntArrayRef input_counts, comm::Communicator& group);

/// Returns a tensor (rows * repeats, ...): row i is row floor(order[i] / repeats) of x. `order` is
/// a permutation of 0 ... rows * repeats - 1, and `inverse` is its inverse (both int64). The
/// gradient of a row of x is the sum of the gradients of its copies, added in the order of the
/// copies.
at::Tensor permute_rows(const at::Tensor& x, const at::Tensor& order, const at::Tensor& inverse,
                        std::int64_t repeats = 1);

/// Multiplies the rows of each expert by the weight of the expert: (rows, in) and (experts, out,
/// in) -> (rows, out). counts[e]: the number of rows of expert e; the rows of expert 0 come first.
/// On CUDA with bf16 the function calls at::_grouped_mm, otherwise at::mm for each expert.
at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, c10::IntArrayRef counts);

}  // namespace tessera::detail
TESSERA_API_END
