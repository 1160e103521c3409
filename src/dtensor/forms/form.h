#pragma once

#include <ATen/core/ivalue.h>

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "../bound_call.h"
#include "../operator_info.h"

namespace tessera::detail {

/// Another way to run an operator than its rule knows, for calls that would gather an input: each
/// rank works on its part, and what is exchanged is of the size of the result. A composition of
/// operators on distributed tensors, or local work that depends on where a part lies.
struct Form {
  std::string_view name;  ///< of the operator, without "aten::"
  /// Bytes that one rank sends in this form; nullopt: it does not cover the call. A pure function
  /// of what all ranks know.
  std::optional<double> (*bytes)(const BoundCall& call);
  /// Arguments to results, as the operator. Below autograd. Collective if bytes() isn't 0.
  std::vector<c10::IValue> (*run)(std::span<const c10::IValue> arguments);
};

/// The form that sends least of a call that would otherwise send `bytes` a rank, if it has one that
/// sends fewer.
struct FormChoice {
  const Form* form = nullptr;
  bool communicates = false;
};
FormChoice choose_form(const BoundCall& call, double bytes);

/// Replaces the call's arguments on the stack by its results.
void run_form(const Form& form, const OperatorInfo& info, std::vector<c10::IValue>& stack);

// The tables, by what the operators do.
std::span<const Form> extremum_forms();
std::span<const Form> norm_forms();
std::span<const Form> statistics_forms();
std::span<const Form> loss_forms();
std::span<const Form> batch_norm_forms();
std::span<const Form> convolution_forms();
std::span<const Form> spatial_convolution_forms();
std::span<const Form> selection_forms();

}  // namespace tessera::detail
