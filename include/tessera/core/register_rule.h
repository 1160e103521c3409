#pragma once

#include <string>
#include <vector>

#include "tessera/core/sharding_rule.h"

namespace tessera {

/// Gives operator `op` ("mylib::scale", with its overload if it has one: "mylib::scale.out") a
/// sharding rule, or one in place of the library's. For this process and all ranks in it; every
/// process of a job must register the same ones. In-place and out= variants are registered under
/// their own names, with the body of the functional operator. `reads_numbers`: the rule depends on
/// the values of float and Scalar arguments. Throws Error after the operator's first use on a
/// distributed tensor, and for a second rule. Thread safe.
void register_rule(std::string op, RuleFunction::Body body, bool reads_numbers = false);

/// One way to run an operator on a mesh dimension: how each tensor argument lies (in schema order,
/// lists flattened), and how each result then lies. Either some inputs are Shard and every result
/// is Shard or Partial; or some inputs are Partial, and so is every result. Negative dimensions
/// count from the end.
struct AcceptedPlacements {
  std::vector<Placement> inputs;
  std::vector<Placement> outputs;
};

/// Sizes of each result of a call.
using ResultSizes = std::function<std::vector<std::vector<std::int64_t>>(const OpCall&)>;
/// The same, declared: on each mesh dimension the operator runs on the local tensors where they lie
/// as one of `accepted` says, or are all replicated. `results`: by default one result, with the
/// sizes of the first tensor. A dimension that two entries split in unlike company, or several
/// reductions, need a rule of factors: an Error at the call. PyTorch's register_sharding.
void register_rule(std::string op, std::vector<AcceptedPlacements> accepted,
                   ResultSizes results = nullptr);

}  // namespace tessera
