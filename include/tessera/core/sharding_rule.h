#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <variant>
#include <vector>

#include "tessera/core/layout.h"
#include "tessera/core/op_call.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// How one operator may be sharded, in the einsum style of GSPMD (Xu et al. 2021) and Shardy. Every
/// dimension of every tensor is an ordered list of factors, major first, whose sizes multiply to
/// its size. Sharding a factor shards, over the same mesh dimensions, each tensor that has it.
/// Inputs that lack it are replicated. Outputs that lack it become Partial if the factor has a
/// reduction; if it has none, it must stay unsharded. For mm (m, k) x (k, n) -> (m, n) the factors
/// are m, n and k, and k has the reduction sum.
///
/// A rule is for one mesh dimension; propagate() expands it over a mesh. A value type.
struct ShardingRule {
  /// The size of a factor of an output that the rule cannot know; the factor must stay unsharded.
  static constexpr std::int64_t kUnknown = -1;
  /// A part of one or several dimensions, of inputs and outputs, that are sharded together.
  struct Factor {
    std::int64_t size = 1;  ///< positions
    /// How outputs that lack the factor become Partial. nullopt: such a factor stays unsharded.
    std::optional<ReduceOp> reduction = std::nullopt;
    /// Whether its shards may differ in size. False where the result depends on that (a mean).
    bool allow_uneven = true;
    /// Whether a shard may be empty. False where the operator throws for that (a maximum of
    /// nothing), which would happen on one rank only.
    bool allow_empty = true;
    /// Must not be sharded although outputs have it (the dimension of a softmax or a sort).
    bool unsharded = false;
    /// A shard must be one contiguous range of the factor (see offset_arguments).
    bool contiguous = false;
  };
  /// The factors of one tensor dimension. Empty: the dimension has size 1 (it broadcasts), or it is
  /// an input's that must stay unsharded and corresponds to no other dimension.
  using Factors = std::vector<int>;            ///< indices in `factors`
  using TensorFactors = std::vector<Factors>;  ///< of one tensor

  std::vector<Factor> factors;
  std::vector<TensorFactors> inputs;  ///< one per OpCall::tensors
  /// One per returned tensor, lists flattened; then one per input that is written and not returned
  /// (the _foreach_..._ operators return nothing).
  std::vector<TensorFactors> outputs;

  /// The operator commutes with a reduction: if all of `partial_inputs` are Partial(op) over a mesh
  /// dimension, and the other inputs replicated there, every output is Partial(op).
  struct Linear {
    std::vector<int> partial_inputs;
    ReduceOp op = ReduceOp::kSum;
  };
  std::vector<Linear> linear;

  /// Inputs that are added to a reduction (the bias of addmm). Where a factor with a reduction is
  /// sharded that they lack, they are made Partial with it, so that they count once.
  std::vector<int> additive;

  /// Inputs whose sizes and type alone are read (the argument of zeros_like, the target of copy_).
  /// They are never reduced, and gathered only where the result has other local sizes.
  std::vector<int> unread;

  /// Arguments that hold the sizes of an output, or of one of its dimensions. On each rank they are
  /// replaced by the local sizes.
  struct SizeArgument {
    int arg = 0;
    int output = 0;
    int dim = -1;  ///< the argument is this dimension's size, an integer; -1: a list of all sizes
    std::int64_t times = 1;  ///< the argument is so many times the dimension's size
  };
  std::vector<SizeArgument> size_arguments;

  /// The call to run on the local tensors instead of the operator's own, where that depends on
  /// sizes that differ locally: squeeze() becomes squeeze.dims; a mean over a sharded dimension
  /// becomes a sum with `scale`. Propagation says whether to use it. SizeArgument::arg counts in
  /// its `args`.
  struct LocalCall {
    /// An operation on a part that no operator does; the code that runs the rule has one for it.
    enum class PartOperator : std::uint8_t {
      /// (weight, indices, first, rows): embedding, where `weight` holds the rows from `first` on
      /// of all `rows`. Zeros for indices of other rows; an index that no part has is an error.
      kEmbeddingRows,
      /// (self, dim, index, first, size): gather, where `self` holds the positions from `first` on
      /// of all `size` along `dim`. Zeros and errors likewise.
      kGatherPart,
    };
    std::variant<std::string_view, PartOperator> op;  ///< an operator's name, with overload
    std::vector<Argument> args;
    double scale = 1.0;  ///< factor for the local results
    /// Used only where one of these factors is sharded; empty: always.
    std::vector<int> when_split = {};
  };
  std::optional<LocalCall> local_call;

  /// Arguments of `local_call` that take a global index: where this rank's shard of dimension `dim`
  /// of input `input` begins. The dimension's factor must be contiguous.
  struct OffsetArgument {
    int arg = 0;
    int input = 0;
    int dim = 0;
  };
  std::vector<OffsetArgument> offset_arguments;

  /// Arguments that say which elements of input `input` this rank has: a list of integers, which is
  /// empty for all of them and becomes flat_place() of a part (layout_math.h).
  struct PlaceArgument {
    int arg = 0;
    int input = 0;
  };
  std::vector<PlaceArgument> place_arguments;

  /// Output `output` is written into input `input` (in-place and out= variants). Where propagate()
  /// finds another layout for the output than the input's, the result is brought to the input's
  /// layout and copied into its local tensor. The result is replicated then: not collective.
  struct Inplace {
    int input = 0;
    int output = 0;
  };
  std::vector<Inplace> inplace;

  /// Tensors whose layouts are chosen together. Empty: all of them. A list operator (_foreach_add_)
  /// has one group per position of its lists. Inputs and outputs in no group are replicated, and
  /// the sizes of such outputs are not known to the rule (the seeds that attention returns).
  struct TensorGroup {
    std::vector<int> inputs;
    std::vector<int> outputs;
  };
  /// The name in 0.1.0.
  using Group [[deprecated("use TensorGroup")]] = TensorGroup;
  std::vector<TensorGroup> groups;

  /// Draws random numbers. Run unchanged, every shard would draw the same ones.
  bool random = false;
};

/// The rule of one operator, as a pure function of a call: nullopt for a call that it does not
/// cover. A null RuleFunction: the operator has no rule. Refers to a table that lives as long as
/// the program.
class RuleFunction {
 public:
  using Body = std::function<std::optional<ShardingRule>(const OpCall&)>;
  /// A rule, and which values a plan made by it depends on.
  struct Entry {
    Body body;
    bool reads_numbers = false;
  };

  RuleFunction(std::nullptr_t = nullptr) {}
  explicit RuleFunction(const Entry* entry) : entry_(entry) {}

  explicit operator bool() const { return entry_ != nullptr; }
  std::optional<ShardingRule> operator()(const OpCall& call) const;
  /// Whether the rule depends on values of Scalar and float arguments (the order of a norm, the
  /// probability of a dropout). If so they are part of the key of the dispatch cache.
  bool reads_numbers() const { return entry_ != nullptr && entry_->reads_numbers; }

 private:
  const Entry* entry_ = nullptr;
};

/// The rule of operator `op` ("aten::add.Tensor"): a user's (register_rule.h), or the library's
/// own, from the tables in src/core/rules/. Thread safe.
RuleFunction find_rule(std::string_view op);

/// The operators of one family, sorted.
struct RuleFamily {
  std::string_view name;
  std::vector<std::string_view> operators;
};
/// All families, in a fixed order.
std::vector<RuleFamily> rule_families();
/// Names of all operators that have a rule of the library's, sorted.
std::vector<std::string_view> ruled_operators();
/// Names of all operators that a user has registered a rule for (register_rule.h), sorted.
std::vector<std::string> user_ruled_operators();

/// What propagate() decides.
struct Propagation {
  /// The layout that each input must be brought to (of an unread one: its own); nullptr: a plain
  /// tensor that may stay plain.
  std::vector<LayoutPtr> inputs;
  /// nullptr: replicated, with the sizes of the local result (an output in no group).
  std::vector<LayoutPtr> outputs;
  /// Global sizes. Negative: unknown to the rule; the local result, unsharded, has the size.
  std::vector<std::vector<std::int64_t>> output_sizes;
  bool use_local_call = false;  ///< run ShardingRule::local_call instead of the operator
};

/// The cheapest way to run `rule` on inputs with layouts `inputs` (nullptr: a plain tensor, which
/// counts as replicated; at least one is not nullptr). Greedy: decides the mesh dimensions one by
/// one, outermost first, in time linear in their number. For each it takes a choice that moves
/// nothing, if there is one; else the one that moves the fewest bytes, counting what reducing a
/// Partial result will cost; on a tie what the largest input prefers. Pure and thread safe. Throws
/// Error where the layouts are for different meshes or do not fit the tensors.
Propagation propagate(const ShardingRule& rule, const OpCall& call,
                      std::span<const LayoutPtr> inputs);

}  // namespace tessera
TESSERA_API_END
