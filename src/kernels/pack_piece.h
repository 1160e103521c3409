#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "device/pack.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::kernels {

/// A copy between tensors of equal sizes as rows; nullopt if one of them does not lie so.
std::optional<PackPiece> pack_piece(const at::Tensor& from, const at::Tensor& to);

}  // namespace tessera::kernels
TESSERA_API_FOR_TEST_END
