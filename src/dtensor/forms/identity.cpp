#include "identity.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/full.h>

#include <limits>

#include "tessera/core/error.h"

namespace tessera::detail {
namespace {

template <class T>
at::Scalar identity_of(ReduceOp op) {
  using Limits = std::numeric_limits<T>;
  if (op == ReduceOp::kMax) return Limits::has_infinity ? T(-Limits::infinity()) : Limits::lowest();
  return Limits::has_infinity ? Limits::infinity() : Limits::max();
}

}  // namespace

at::Tensor identity(c10::IntArrayRef sizes, ReduceOp op, const at::TensorOptions& options) {
  TESSERA_CHECK(op == ReduceOp::kMax || op == ReduceOp::kMin,
                "internal: an identity of a maximum or minimum was expected");
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  const auto value =
      AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, dtype, "identity",
                                 [&] { return identity_of<scalar_t>(op); });
  return at::full(sizes, value, options);
}

}  // namespace tessera::detail
