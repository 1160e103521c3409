#include "execute/run_form.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "autograd/leaf_gradient.h"
#include "operators/bound_call.h"
#include "tensor/distributed_impl.h"

namespace tessera::detail {

void run_form(PlannedCall& call) {
  // What localize_arguments does for the other kinds of plans: a leaf learns to keep its gradient's
  // layout, and a stale view is refused.
  for (const at::Tensor& tensor : bind_call(call.info, call.arguments()).tensors) {
    if (DistributedTensorImpl* impl = as_distributed(tensor)) {
      keep_gradient_layout(*impl, tensor);
      check_readable(*impl, call.info.name);
    }
  }
  // Below autograd but not below our key: a form calls operators on distributed tensors.
  const at::AutoDispatchBelowADInplaceOrView below;
  std::vector<c10::IValue> results = call.plan.form->run(call.arguments());
  // Not before: the form reads its arguments where they are.
  call.stack.resize(call.first);
  std::ranges::move(results, std::back_inserter(call.stack));
}

}  // namespace tessera::detail
