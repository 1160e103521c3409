// libtorch's compositions of operators, called directly: an operator that the library has a kernel
// for goes to that kernel on a distributed tensor, and the kernel then calls the composition. at::
// has only the call that dispatches.
//
// A new version may write a composition differently. The tests of operators find reads of memory,
// or plain tensors, inside one; this canary sees only that each exists and is still a composition.
//
// Canary: CompositeKernelsCanary.
#pragma once

#include <ATen/core/Tensor.h>

#include <ATen/ops/ctc_loss_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/kron_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/matmul_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/max_pool1d_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/nanquantile_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/one_hot_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/quantile_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/reshape_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/tensor_split_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/value_selecting_reduction_backward_compositeimplicitautograd_dispatch.h>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

namespace composite = at::compositeimplicitautograd;

}  // namespace tessera::detail
TESSERA_API_END
