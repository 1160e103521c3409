#include "form.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include "../distributed_impl.h"
#include "../leaf_gradient.h"

namespace tessera::detail {
namespace {

std::vector<const Form*> forms_of(std::string_view op) {
  constexpr std::string_view kNamespace = "aten::";
  if (!op.starts_with(kNamespace)) return {};
  op.remove_prefix(kNamespace.size());
  std::vector<const Form*> found;
  for (const auto forms :
       {extremum_forms(), norm_forms(), statistics_forms(), loss_forms(), batch_norm_forms(),
        convolution_forms(), spatial_convolution_forms(), selection_forms()}) {
    for (const auto& form : forms) {
      if (form.name == op) found.push_back(&form);
    }
  }
  return found;
}

void prepare(const at::Tensor& tensor, const OperatorInfo& info) {
  auto* impl = as_distributed(tensor);
  if (impl == nullptr) return;
  keep_gradient_layout(*impl, tensor);
  check_readable(*impl, info.name);
}

}  // namespace

FormChoice choose_form(const BoundCall& call, double bytes) {
  FormChoice choice;
  for (const auto* form : forms_of(call.call.op)) {
    const auto own = form->bytes(call);
    if (!own || *own >= bytes) continue;
    choice = {form, *own > 0};
    bytes = *own;
  }
  return choice;
}

void run_form(const Form& form, const OperatorInfo& info, std::vector<c10::IValue>& stack) {
  const auto first = stack.size() - info.arguments.size();
  const auto arguments = std::span<const c10::IValue>(stack).subspan(first);
  for (const auto& tensor : bind_call(info, arguments).tensors) prepare(tensor, info);
  const at::AutoDispatchBelowADInplaceOrView below;
  auto results = form.run(arguments);
  stack.resize(first);
  std::ranges::move(results, std::back_inserter(stack));
}

}  // namespace tessera::detail
