#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tessera/core/layout.h"

namespace tessera {

/// What a rule sees of a tensor: its global sizes.
struct TensorMeta {
  std::vector<std::int64_t> sizes;
  std::int64_t itemsize = 4;
};

/// An argument that is a tensor: its index in OpCall::tensors.
struct TensorRef {
  int index = -1;
};

/// An argument of an operator, in schema order, free of libtorch's types. monostate is None.
using Argument = std::variant<std::monostate, bool, std::int64_t, double, std::string,
                              std::vector<std::int64_t>, TensorRef, std::vector<TensorRef>>;

/// A call of an operator on distributed tensors, as its rule sees it.
struct OpCall {
  std::string_view op;  ///< name with overload: "aten::add.Tensor"; no overload: "aten::mm"
  std::vector<Argument> args;
  std::vector<TensorMeta> tensors;

  const TensorMeta& tensor(std::size_t arg) const;      ///< argument `arg`, a tensor
  bool has_tensor(std::size_t arg) const;               ///< present and not None
  std::int64_t integer(std::size_t arg) const;          ///< an integer or a bool
  std::int64_t integer_or(std::size_t arg, std::int64_t otherwise) const;
  bool boolean_or(std::size_t arg, bool otherwise) const;
  std::vector<std::int64_t> integers(std::size_t arg) const;  ///< a list; empty for None
};

/// How one operator may be sharded, in the einsum style of GSPMD and Shardy: every dimension of
/// every tensor is an ordered list of factors (major first). Sharding a factor shards, on the same
/// mesh dimensions, each tensor that has it; an output that lacks it becomes partial if the factor
/// is a reduction, and the factor must stay whole if it is not.
///
/// It is a rule for one mesh dimension at a time; propagate() expands it over a mesh.
struct ShardingRule {
  struct Factor {
    std::int64_t size = 1;
    /// Absent from the outputs: the reduction that makes it so. nullopt: must stay whole.
    std::optional<ReduceOp> reduction;
    /// May be split unevenly. False where a shard's result depends on its size (a mean).
    bool uneven = true;
    /// Must stay whole although outputs have it (the dimension of a softmax or a sort).
    bool whole = false;
  };
  using Factors = std::vector<int>;           ///< of one tensor dimension; empty: size 1, no factor
  using TensorFactors = std::vector<Factors>;  ///< of one tensor

  std::vector<Factor> factors;
  std::vector<TensorFactors> inputs;   ///< one per OpCall::tensors
  std::vector<TensorFactors> outputs;  ///< one per output tensor, list outputs flattened

  /// Linear in partial inputs: a set of inputs that may all be partial with `op` on a mesh
  /// dimension (the others replicated there), every output then being partial too.
  struct Linear {
    std::vector<int> partial_inputs;
    ReduceOp op = ReduceOp::kSum;
  };
  std::vector<Linear> linear;

  /// Arguments that hold the sizes of an output, to be rewritten to its local sizes.
  struct SizeArgument {
    int arg = 0;
    int output = 0;
  };
  std::vector<SizeArgument> size_arguments;

  /// Output `output` must keep the layout of input `input` (in-place and out= variants).
  struct Inplace {
    int input = 0;
    int output = 0;
  };
  std::vector<Inplace> inplace;
};

/// nullopt: this call has no rule (a case the rule does not cover).
using RuleFunction = std::optional<ShardingRule> (*)(const OpCall&);

/// The rule of operator `op`, or nullptr. Rules are in src/core/rules/, a table per family.
RuleFunction find_rule(std::string_view op);
/// Names of all operators that have a rule, sorted.
std::vector<std::string_view> ruled_operators();

/// What propagate() decides.
struct Propagation {
  std::vector<LayoutPtr> inputs;  ///< the layout that each input must be brought to
  std::vector<LayoutPtr> outputs;
  std::vector<std::vector<std::int64_t>> output_sizes;  ///< global
};

/// The cheapest way to run `rule` on inputs that lie as `inputs` says (nullptr: a plain tensor that
/// is replicated). The mesh dimensions are decided one by one, outermost first, each for the choice
/// that moves the fewest bytes, so the search is linear in them.
Propagation propagate(const ShardingRule& rule, const OpCall& call,
                      std::span<const LayoutPtr> inputs);

}  // namespace tessera
