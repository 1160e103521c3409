#pragma once

#include <initializer_list>

#include "tessera/nn/initialization.h"
#include "tessera/nn/linear.h"

namespace tessera::nn::detail {

/// Fills the Linears of a block: those of `in` that are not null, normal with `std`, then `out`,
/// with `out_std` if that is above 0; biases are zeros.
void fill_linears(const InitContext& init, std::initializer_list<const Linear*> in,
                  const Linear& out, double std, double out_std);

}  // namespace tessera::nn::detail
