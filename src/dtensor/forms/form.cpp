// Which form a call takes, and how it is run. The other files of this room have the tables, by what
// the operators do; plan_call asks here once for each new call, after the rule has said what would
// be moved.

#include "forms/form.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

#include "plan/call_plan.h"
#include "tensor/distributed_impl.h"
#include "tensor/leaf_gradient.h"

namespace tessera::detail {

std::vector<std::span<const Form>> form_tables() {
  return {extremum_forms(),     norm_forms(),        statistics_forms(),          loss_forms(),
          batch_norm_forms(),   convolution_forms(), spatial_convolution_forms(), selection_forms(),
          cross_entropy_forms()};
}

/// A search through all tables: OperatorTraits keeps what it finds for each operator.
std::vector<const Form*> forms_of(std::string_view name) {
  std::vector<const Form*> found;
  for (const auto table : form_tables()) {
    for (const Form& form : table) {
      if (form.name == name) {
        found.push_back(&form);
      }
    }
  }
  return found;
}

FormChoice choose_form(const OperatorInfo& info, const BoundCall& bound, double bytes) {
  FormChoice choice;
  for (const Form* form : info.traits.forms()) {
    const std::optional<double> own = form->bytes(bound);
    if (own && form->own_collectives) {
      return {form, /*moves=*/false};
    }
    // A form that sends as much as the rule is not worth its own kernels; of equal forms the first
    // is taken.
    if (!own || *own >= bytes) {
      continue;
    }
    choice = {form, *own > 0};
    bytes = *own;
  }
  return choice;
}

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
