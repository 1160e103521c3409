#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

#include "tessera/export.h"
#include "tessera/internals/detail/graph_node.h"
#include "tessera/nn/detail/linear_products.h"

TESSERA_API_BEGIN
namespace tessera::nn::detail {

/// aten::linear of x, (..., in), weight, (out, in), and bias, (out) or undefined. x is kept,
/// as a KeptTensor, for the weight's gradient.
at::Tensor linear_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

/// sum + a b of matrices, in the memory of `sum` where no communication is due and no backward is
/// recorded; `sum` may be undefined.
at::Tensor with_product(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b);

/// What `node`, which runs, returns for the weight of a product, its `output`-th input: the product
/// of rows^T, (out, tokens), and x, (tokens, in). Undefined where that product was added to the
/// weight's gradient as it was computed: in a whole backward, to a gradient of the same type,
/// layout and mesh that no hook of the program sees terms of. Local, but what aten::mm
/// communicates.
at::Tensor gradient_of_weight(tessera::detail::Node& node, std::size_t output,
                              const at::Tensor& rows, const at::Tensor& x);

}  // namespace tessera::nn::detail
TESSERA_API_END
