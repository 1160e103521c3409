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
/// the dimension's size. Sharding a factor shards each tensor that has it, over the same mesh
/// dimensions. Inputs without the factor are replicated. Outputs without the factor become Partial
/// if the factor has a reduction; if it has none, the factor must stay unsharded. For mm (m, k) x
/// (k, n) -> (m, n) the factors are m, n and k, and k has the reduction sum.
///
/// A rule describes one mesh dimension; propagate() applies it to a whole mesh. A value type.
struct ShardingRule {
  /// The size of an output's factor that the rule cannot know; the factor must stay unsharded.
  static constexpr std::int64_t kUnknown = -1;
  /// A part of one or several dimensions, of inputs and outputs, that are sharded together.
  struct Factor {
    std::int64_t size = 1;  ///< number of positions
    /// The reduction by which outputs without the factor become Partial. nullopt: the factor stays
    /// unsharded if an output lacks it.
    std::optional<ReduceOp> reduction = std::nullopt;
    /// Whether the factor's shards may differ in size. False if the result depends on equal sizes
    /// (a mean).
    bool allow_uneven = true;
    /// Whether a shard may be empty. False if the operator throws for an empty tensor (a maximum),
    /// which would happen on one rank only.
    bool allow_empty = true;
    /// True if the factor must not be sharded although outputs have it (the dimension of a softmax
    /// or a sort).
    bool unsharded = false;
    /// Whether a shard must be one contiguous range of the factor (see offset_arguments).
    bool contiguous = false;
  };
  /// The factors of one tensor dimension. Empty if the dimension has size 1 (it broadcasts), or if
  /// it is an input dimension that must stay unsharded and corresponds to no other dimension.
  using Factors = std::vector<int>;            ///< indices in `factors`
  using TensorFactors = std::vector<Factors>;  ///< the factors of all dimensions of one tensor

  std::vector<Factor> factors;
  std::vector<TensorFactors> inputs;  ///< one entry for each of OpCall::tensors
  /// One entry for each returned tensor, lists flattened; then one for each input that is written
  /// and not returned (the _foreach_..._ operators return nothing).
  std::vector<TensorFactors> outputs;

  /// Declares that the operator commutes with a reduction: if all of `partial_inputs` are
  /// Partial(op) over a mesh dimension, and the other inputs are replicated over it, then every
  /// output is Partial(op).
  struct Linear {
    std::vector<int> partial_inputs;
    ReduceOp op = ReduceOp::kSum;
  };
  std::vector<Linear> linear;

  /// Inputs that are added to the result of a reduction (the bias of addmm). If a factor that they
  /// lack is sharded and has a reduction, these inputs are made Partial with it, so that they count
  /// once.
  std::vector<int> additive;

  /// Inputs of which only sizes and type are read (the argument of zeros_like, the target of
  /// copy_). They are never reduced, and are gathered only if the result has other local sizes.
  std::vector<int> unread;

  /// An argument that contains the sizes of an output, or the size of one of its dimensions. On
  /// each rank it is replaced by the local sizes.
  struct SizeArgument {
    int arg = 0;
    int output = 0;
    int dim = -1;            ///< index of the dimension whose size it is; -1: it lists all sizes
    std::int64_t times = 1;  ///< the argument is this multiple of the dimension's size
  };
  std::vector<SizeArgument> size_arguments;

  /// The call to run on the local tensors instead of the operator itself, if the operator depends
  /// on sizes that differ locally: squeeze() becomes squeeze.dims; a mean over a sharded dimension
  /// becomes a sum with `scale`. Propagation says whether to use it. SizeArgument::arg is then an
  /// index in its `args`.
  struct LocalCall {
    /// An operation on a part of a tensor for which no operator exists. The code that runs the rule
    /// implements it.
    enum class PartOperator : std::uint8_t {
      /// (weight, indices, first, rows): embedding, where `weight` contains the rows from `first`
      /// on of all `rows`. The result is zero for indices of other rows; an index that no part
      /// contains is an error.
      kEmbeddingRows,
      /// (self, dim, index, first, size): gather, where `self` contains the positions from `first`
      /// on of all `size` positions along `dim`. Zeros and errors are as for kEmbeddingRows.
      kGatherPart,
    };
    /// an operator's name with overload, or a part operator
    std::variant<std::string_view, PartOperator> op;
    std::vector<Argument> args;
    double scale = 1.0;  ///< the local results are multiplied by it
    /// The local call is used only if one of these factors is sharded; empty: always.
    std::vector<int> when_split = {};
  };
  std::optional<LocalCall> local_call;

  /// An argument of `local_call` that is a global index: the beginning of this rank's shard of
  /// dimension `dim` of input `input`. The dimension's factor must be contiguous.
  struct OffsetArgument {
    int arg = 0;
    int input = 0;
    int dim = 0;
  };
  std::vector<OffsetArgument> offset_arguments;

  /// An argument that says which elements of input `input` this rank has: a list of integers. It is
  /// empty if the rank has all elements; for a part it is replaced by flat_place() of the part
  /// (layout_math.h).
  struct PlaceArgument {
    int arg = 0;
    int input = 0;
  };
  std::vector<PlaceArgument> place_arguments;

  /// Output `output` is written into input `input` (in-place and out= variants). If propagate()
  /// finds another layout for the output than the input's, the result is redistributed to the
  /// input's layout and copied into the input's local tensor. The result is then replicated, so
  /// this is not collective.
  struct Inplace {
    int input = 0;
    int output = 0;
  };
  std::vector<Inplace> inplace;

  /// Tensors whose layouts are chosen together; an empty list of groups means one group of all
  /// tensors. A list operator (_foreach_add_) has one group for each position of its lists. Inputs
  /// and outputs in no group are replicated, and the rule does not know the sizes of such outputs
  /// (the seeds that attention returns).
  struct TensorGroup {
    std::vector<int> inputs;
    std::vector<int> outputs;
  };
  /// The name in version 0.1.0.
  using Group [[deprecated("use TensorGroup")]] = TensorGroup;
  std::vector<TensorGroup> groups;

  /// Whether the operator draws random numbers. Run unchanged, it would draw the same numbers on
  /// every shard.
  bool random = false;
};

/// The rule of one operator, as a pure function of a call; the result is nullopt for a call that
/// the rule does not cover. A null RuleFunction means that the operator has no rule. Refers to a
/// table that lives as long as the program.
class RuleFunction {
 public:
  using Body = std::function<std::optional<ShardingRule>(const OpCall&)>;
  /// A rule, and whether its result depends on the values of numbers.
  struct Entry {
    Body body;
    bool reads_numbers = false;
  };

  RuleFunction(std::nullptr_t = nullptr) {}
  explicit RuleFunction(const Entry* entry) : entry_(entry) {}

  explicit operator bool() const { return entry_ != nullptr; }
  std::optional<ShardingRule> operator()(const OpCall& call) const;
  /// Whether the rule depends on values of Scalar and float arguments (the order of a norm, the
  /// probability of a dropout). If so, these values are part of the dispatch cache's key.
  bool reads_numbers() const { return entry_ != nullptr && entry_->reads_numbers; }

 private:
  const Entry* entry_ = nullptr;
};

/// The rule of operator `op` ("aten::add.Tensor"): a user's rule (register_rule.h), or the
/// library's rule from the tables in src/core/rules/. Thread safe.
RuleFunction find_rule(std::string_view op);

/// The operators of one family, sorted.
struct RuleFamily {
  std::string_view name;
  std::vector<std::string_view> operators;
};
/// All families, in a fixed order.
std::vector<RuleFamily> rule_families();
/// Names of all operators for which the library has a rule, sorted.
std::vector<std::string_view> ruled_operators();
/// Names of all operators for which a user has registered a rule (register_rule.h), sorted.
std::vector<std::string> user_ruled_operators();

/// The decision of propagate() for one call.
struct Propagation {
  /// The layout to which each input must be redistributed (for an unread input, its own layout);
  /// nullptr for a plain tensor that may stay plain.
  std::vector<LayoutPtr> inputs;
  /// The layout of each output; nullptr for an output in no group, which is replicated and has the
  /// sizes of the local result.
  std::vector<LayoutPtr> outputs;
  /// Global sizes of each output. A negative size is unknown to the rule; the dimension is
  /// unsharded, so the local result has this size.
  std::vector<std::vector<std::int64_t>> output_sizes;
  bool use_local_call = false;  ///< run ShardingRule::local_call instead of the operator
};

/// The cheapest way to run `rule` on inputs with layouts `inputs` (nullptr: a plain tensor, which
/// counts as replicated; at least one is not nullptr). Greedy: decides the mesh dimensions one by
/// one, outermost first, in time linear in their number. For each mesh dimension it prefers a
/// choice without data movement. Otherwise it takes the choice that moves the fewest bytes,
/// including the later reduction of a Partial result. On a tie it prefers the layout of the largest
/// input. Pure and thread safe. Throws Error if the layouts are for different meshes or do not fit
/// the tensors.
Propagation propagate(const ShardingRule& rule, const OpCall& call,
                      std::span<const LayoutPtr> inputs);

}  // namespace tessera
TESSERA_API_END
