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

/// Returns (rows * repeats, ...), with row floor(order[i] / repeats) of x as row i. `order`: a
/// permutation of 0 ... rows * repeats - 1; `inverse`: its inverse (both int64). The gradients of a
/// row's copies are added in the order of the copies.
at::Tensor permute_rows(const at::Tensor& x, const at::Tensor& order, const at::Tensor& inverse,
                        std::int64_t repeats = 1);

/// Multiplies each expert's rows by the expert's weight: (rows, in) and (experts, out, in) ->
/// (rows, out). counts[e]: the number of rows of expert e, in the order of the experts.
at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, c10::IntArrayRef counts);

}  // namespace tessera::detail
TESSERA_API_END
