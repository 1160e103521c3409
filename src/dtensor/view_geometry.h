#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace tessera::detail {

/// The strides that the results of a view operator have on tensors of global sizes, each in turn:
/// the operator run on meta tensors. Local strides would not do: a local size of 1 leaves them
/// open, and ranks would disagree. Throws what the operator throws, on every rank alike. nullopt if
/// the operator does not run on meta tensors.
std::optional<std::vector<std::vector<std::int64_t>>> view_strides(
    const c10::OperatorHandle& op, std::span<const c10::IValue> arguments);

}  // namespace tessera::detail
