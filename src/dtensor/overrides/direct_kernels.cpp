// Operators that skip the fallback: they only touch the wrapper, so that there is nothing to plan
// and no key to encode.

#include <ATen/core/Tensor.h>
#include <ATen/ops/detach.h>
#include <torch/library.h>

#include "rank/below_autograd.h"
#include "tensor/distributed_impl.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/internals/detail/dispatch_keys.h"

namespace tessera::detail {
namespace {

at::Tensor detach(const at::Tensor& self) {
  const auto* impl = as_distributed(self);
  if (impl == nullptr) {
    // An operator mode or a MetaDevice scope brings plain tensors here, too.
    BelowFallback guard;
    return at::detach(self);
  }
  return alias_tensor(*impl, /*allows_change=*/false);
}

/// Compares global sizes: the wrapper's.
bool is_same_size(const at::Tensor& self, const at::Tensor& other) {
  return self.sizes() == other.sizes();
}

/// Called by set_data, which would give a plain tensor a distributed one's dispatch key.
bool may_take_data_of(const at::Tensor& self, const at::Tensor& from) {
  const bool ours = as_distributed(self) != nullptr;
  TESSERA_CHECK(ours == (as_distributed(from) != nullptr), "set_data between a ",
                ours ? "distributed tensor and a plain one" : "plain tensor and a distributed one",
                ": assign a new tensor, or copy_ the values");
  return ours || may_take_state_of(self, from);
}

TORCH_LIBRARY_IMPL(aten, TESSERA_DISTRIBUTED_KEY, library) {
  library.impl("detach", &detach);
  library.impl("is_same_size", &is_same_size);
  library.impl("_has_compatible_shallow_copy_type", &may_take_data_of);
}

// set_data calls it with autograd's keys on: for a plain tensor only these lead to this kernel.
TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) {
  library.impl("_has_compatible_shallow_copy_type", &may_take_data_of);
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) {
  library.impl("_has_compatible_shallow_copy_type", &may_take_data_of);
}
TORCH_LIBRARY_IMPL(aten, AutogradMeta, library) {
  library.impl("_has_compatible_shallow_copy_type", &may_take_data_of);
}

}  // namespace
}  // namespace tessera::detail
