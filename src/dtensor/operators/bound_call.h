#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <span>
#include <vector>

#include "operators/operator_info.h"

namespace tessera::detail {

/// A call as its rule sees it, and the tensors that it names. Undefined tensors are None.
struct BoundCall {
  OpCall call;
  std::vector<at::Tensor> tensors;
};

/// `arguments`: one value for each argument of the schema. Copies the references and sizes of all
/// tensors, so kDirect and kLocal run without it.
BoundCall bind_call(const OperatorInfo& info, std::span<const c10::IValue> arguments);

/// Back from a rule's argument to what a parameter of `type` takes; tensors are looked up in
/// `tensors`.
c10::IValue to_ivalue(const Argument& argument, const c10::Type& type,
                      std::span<const at::Tensor> tensors);

}  // namespace tessera::detail
