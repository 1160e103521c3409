#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <span>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

/// Calls `visit` with each defined tensor in `values`, including the tensors in lists.
template <class Visit>
void visit_tensors(std::span<const c10::IValue> values, Visit&& visit) {
  const auto visit_one = [&visit](const at::Tensor& tensor) {
    if (tensor.defined()) {
      visit(tensor);
    }
  };
  for (const c10::IValue& value : values) {
    if (value.isTensor()) {
      visit_one(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        visit_one(tensor);
      }
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        visit_one(tensor.value_or(at::Tensor()));
      }
    }
  }
}

/// Returns a copy of `value` in which each defined tensor is replaced by `make(tensor)`.
template <class Make>
c10::IValue with_tensors(const c10::IValue& value, Make&& make) {
  const auto made = [&make](const at::Tensor& tensor) {
    return tensor.defined() ? at::Tensor(make(tensor)) : tensor;
  };
  if (value.isTensor()) {
    return made(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(made(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(made(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

}  // namespace tessera::kernels
TESSERA_API_END
