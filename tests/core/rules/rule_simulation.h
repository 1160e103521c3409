#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <string>
#include <vector>

#include "tessera/core/detail/layout.h"

namespace tessera::testing {

/// A call of a libtorch operator. The arguments are made anew for every use.
struct RuleCase {
  std::string op;  ///< "aten::add.Tensor"
  std::function<std::vector<c10::IValue>()> arguments;
};

/// Runs `rule_case` as its rule says, in one process, without communication: every coordinate of
/// the mesh gets its part of each argument (terms that add up where a partial one is wanted,
/// garbage where the rule says that values are not read), runs the operator, and the results are
/// put together. Returns what differs from the operator on the whole tensors, "" if nothing does,
/// and "no rule" where the rule does not cover the call.
///
/// `layouts`: how the tensors among the arguments lie, in order; nullptr: plain.
std::string simulate(const RuleCase& rule_case, const std::vector<LayoutPtr>& layouts);

/// The tensors among the arguments, lists included, in order.
std::vector<at::Tensor> tensors_of(const std::vector<c10::IValue>& arguments);

}  // namespace tessera::testing
