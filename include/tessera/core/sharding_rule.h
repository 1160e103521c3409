#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/core/layout.h"
#include "tessera/core/op_call.h"

namespace tessera {

/// How one operator may be sharded, in the einsum style of GSPMD and Shardy: every dimension of
/// every tensor is an ordered list of factors (major first) whose sizes multiply to its size.
/// Sharding a factor shards, on the same mesh dimensions, each tensor that has it; an output that
/// lacks it becomes partial if the factor is a reduction, and the factor must stay whole if it is
/// not. Inputs that lack it are replicated.
///
/// It is a rule for one mesh dimension at a time; propagate() expands it over a mesh.
struct ShardingRule {
  /// Size of a factor of an output that the rule cannot tell; it must stay whole.
  static constexpr std::int64_t kUnknown = -1;
  struct Factor {
    std::int64_t size = 1;
    /// What becomes of outputs that lack the factor. nullopt: it must stay whole.
    std::optional<ReduceOp> reduction = std::nullopt;
    /// May be split unevenly. False where a shard's result depends on its size (a mean).
    bool uneven = true;
    /// May be split so that a coordinate gets none of it. False where that is an error (a maximum
    /// of nothing), which one rank alone would throw.
    bool empty = true;
    /// Must stay whole although outputs have it (the dimension of a softmax or a sort).
    bool whole = false;
    /// A part must be one contiguous range (see offset_arguments).
    bool contiguous = false;
  };
  /// Of one tensor dimension. Empty: the dimension has size 1 (it broadcasts), or, in an input,
  /// must stay whole and has nothing that corresponds to it.
  using Factors = std::vector<int>;
  using TensorFactors = std::vector<Factors>;  ///< of one tensor

  std::vector<Factor> factors;
  std::vector<TensorFactors> inputs;  ///< one per OpCall::tensors
  /// One per returned tensor, list outputs flattened; then one per mutated input that is not
  /// returned (the operators of the _foreach_..._ kind return nothing).
  std::vector<TensorFactors> outputs;

  /// Linear in partial inputs: a set of inputs that may all be partial with `op` on a mesh
  /// dimension (the others replicated there), every output then being partial too.
  struct Linear {
    std::vector<int> partial_inputs;
    ReduceOp op = ReduceOp::kSum;
  };
  std::vector<Linear> linear;

  /// Inputs that are added to a reduction (the bias of addmm): made partial, with the factor's
  /// reduction, where a reduction factor that they lack is sharded.
  std::vector<int> additive;

  /// Inputs of which only sizes and type are read (the argument of zeros_like, the target of
  /// copy_): never reduced, and gathered only where the result needs other local sizes.
  std::vector<int> unread;

  /// Arguments that hold the sizes of an output, or the size of one of its dimensions, to be
  /// rewritten to its local sizes.
  struct SizeArgument {
    int arg = 0;
    int output = 0;
    int dim = -1;  ///< the argument is this dimension's size, an integer; -1: a list of all sizes
  };
  std::vector<SizeArgument> size_arguments;

  /// What to run on the local tensors instead of the operator itself, where its meaning depends on
  /// sizes that differ locally: squeeze() becomes squeeze.dims; a mean over a split dimension
  /// becomes a sum with `scale`. SizeArgument::arg counts in `args`. Propagation says whether to
  /// use it.
  struct LocalCall {
    std::string_view op;
    std::vector<Argument> args;
    double scale = 1.0;  ///< the local results are to be multiplied by this
    /// Only where one of these factors is split; empty: always.
    std::vector<int> when_split = {};
  };
  std::optional<LocalCall> local_call;

  /// Arguments of `local_call` that take the global index at which this rank's part of dimension
  /// `dim` of input `input` begins. Its factor must be contiguous.
  struct OffsetArgument {
    int arg = 0;
    int input = 0;
    int dim = 0;
  };
  std::vector<OffsetArgument> offset_arguments;

  /// Output `output` is written into input `input` (in-place and out= variants). If the layout that
  /// propagate() finds for the output is not the input's own, the caller brings the result to the
  /// input's layout and copies it into the input's local tensor: from replicated, so never
  /// collective.
  struct Inplace {
    int input = 0;
    int output = 0;
  };
  std::vector<Inplace> inplace;

  /// Tensors that are decided together. Empty: all are. The list operators (_foreach_add_) have one
  /// group per position of their lists. An input in no group is replicated; an output in no group
  /// is too, and the rule does not know its sizes (the seeds that attention returns).
  struct Group {
    std::vector<int> inputs;
    std::vector<int> outputs;
  };
  std::vector<Group> groups;

  /// Draws random numbers: the local operator alone would give every shard the same ones.
  bool random = false;
};

/// The rule of one operator: a pure function, nullopt where the call is a case that it does not
/// cover. Null where the operator has none. Refers to a table that lives as long as the program.
class RuleFunction {
 public:
  using Body = std::function<std::optional<ShardingRule>(const OpCall&)>;
  struct Entry {
    Body body;
    bool reads_numbers = false;
  };

  RuleFunction(std::nullptr_t = nullptr) {}
  explicit RuleFunction(const Entry* entry) : entry_(entry) {}

  explicit operator bool() const { return entry_ != nullptr; }
  std::optional<ShardingRule> operator()(const OpCall& call) const;
  /// Whether the rule depends on values of Scalar and float arguments (the order of a norm, the
  /// probability of a dropout): then they are part of what its result may be cached by.
  bool reads_numbers() const { return entry_ != nullptr && entry_->reads_numbers; }

 private:
  const Entry* entry_ = nullptr;
};

/// The rule of operator `op` ("aten::add.Tensor"): a user's (register_rule.h), or one of those in
/// src/core/rules/, a table per family.
RuleFunction find_rule(std::string_view op);

/// The operators of one family, sorted.
struct RuleFamily {
  std::string_view name;
  std::vector<std::string_view> operators;
};
/// All families, in a fixed order.
std::vector<RuleFamily> rule_families();
/// Names of all operators that have a rule, sorted.
std::vector<std::string_view> ruled_operators();

/// What propagate() decides.
struct Propagation {
  /// The layout that each input must be brought to (its own for an unread one); nullptr: a plain
  /// tensor that may stay plain.
  std::vector<LayoutPtr> inputs;
  /// nullptr: replicated, and its sizes are those of the local result (an output in no group).
  std::vector<LayoutPtr> outputs;
  /// Global. Negative: unknown to the rule, and that of the local result (it is not split).
  std::vector<std::vector<std::int64_t>> output_sizes;
  bool use_local_call = false;  ///< run ShardingRule::local_call instead of the operator
};

/// The cheapest way to run `rule` on inputs that lie as `inputs` says (nullptr: a plain tensor that
/// is replicated; at least one is not). The mesh dimensions are decided one by one, outermost
/// first: a choice that moves nothing if there is one, else the one that moves the fewest bytes
/// (counting what a partial result will cost), on a tie what the largest input prefers. So the
/// search is linear in the mesh dimensions. Throws Error where the layouts are of different meshes
/// or don't fit.
Propagation propagate(const ShardingRule& rule, const OpCall& call,
                      std::span<const LayoutPtr> inputs);

}  // namespace tessera
