#pragma once

#include <ATen/core/ivalue.h>

#include <initializer_list>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "operators/bound_call.h"
#include "operators/operator_info.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::detail {

using Arguments = std::span<const c10::IValue>;
using Results = std::vector<c10::IValue>;

/// Another way to run an operator than its rule, for calls that would gather an input: each rank
/// works on its shard, and only data of the result's size are exchanged. A composition of operators
/// on distributed tensors, or local work that depends on which elements a rank holds.
struct Form {
  std::string_view name;  ///< of the operator; one of libtorch's without "aten::"
  /// Bytes that one rank sends in this form; nullopt: it does not cover the call. A pure function
  /// of what is in the call's key.
  std::optional<double> (*bytes)(const BoundCall& call);
  /// Arguments to results, as the operator. Below autograd. Collective if bytes() isn't 0.
  Results (*run)(Arguments arguments);
  /// The exchange is the operator's purpose: its caller has asked for it, also in a strict scope.
  /// Such a form is taken wherever it covers the call, whatever it sends.
  bool own_collectives = false;
};

/// The form that sends the least for a call that would otherwise send `bytes` a rank, if its
/// operator has one that sends fewer.
struct FormChoice {
  const Form* form = nullptr;
  bool moves = false;  ///< it exchanges what the caller has not asked for
};
FormChoice choose_form(const OperatorInfo& info, const BoundCall& bound, double bytes);

/// All forms of an operator.
std::span<const Form* const> forms_of(const OperatorInfo& info);

/// Registers forms: a static object of the file that defines them, made while libraries are loaded.
/// The forms of one operator are in one such object, or their order is that of the link.
struct AddedForms {
  AddedForms(std::initializer_list<Form> forms);
};
/// All forms, a table for each AddedForms.
std::vector<std::span<const Form>> form_tables();

}  // namespace tessera::detail
TESSERA_API_FOR_TEST_END
