// How exactly libtorch knows which of the sorted values a quantile stands between: in the type of
// the values, or in double. Of floats the results differ where q times their number is next to a
// whole number, and libtorch does not say what it does.
//
// To 2.13 the type of the values, from 2.14 double.
//
// Canary: QuantileRanksCanary.
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/version.h>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// The type in which quantiles of values of type `values` are looked up.
inline c10::ScalarType type_of_quantile_ranks([[maybe_unused]] c10::ScalarType values) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 14
  return values;
#else
  return c10::ScalarType::Double;
#endif
}

}  // namespace tessera::detail
TESSERA_API_END
