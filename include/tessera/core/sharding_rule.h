// Calls of operators, their sharding rules, and functions for writing rules (register_rule.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/detail/local_execution.h"
#include "tessera/core/placement.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The properties of a tensor that a sharding rule can read.
struct TensorMeta {
  std::vector<std::int64_t> sizes;  ///< global sizes of the tensor
  std::int64_t itemsize = 4;        ///< number of bytes of an element

  int ndim() const { return static_cast<int>(sizes.size()); }
  std::int64_t size(int dim) const { return sizes[static_cast<std::size_t>(dim)]; }
  std::int64_t numel() const;
};

/// A call of an operator on distributed tensors, for the operator's sharding rule. The arguments
/// are in the order of the schema, include keyword-only arguments and `out`, and have default
/// values where the caller gave none. A tensor that is passed twice is in `tensors` twice.
///
/// The parameter `arg` of a member function is the index of an argument. The member functions treat
/// an argument after the last one as None, and throw Error for an argument of another kind.
struct OpCall {
  std::string_view op;  ///< name with overload: "aten::add.Tensor"; no overload: "aten::mm"
  std::vector<Argument> args;
  std::vector<TensorMeta> tensors;

  bool has_tensor(std::size_t arg) const;  ///< whether the argument is a tensor, and not None
  /// The index of a tensor argument in `tensors`.
  int tensor_index(std::size_t arg) const;
  const TensorMeta& tensor(std::size_t arg) const;
  /// The tensors of a list argument. A single tensor is a list of one tensor, and None is an empty
  /// list.
  std::vector<TensorRef> tensor_list(std::size_t arg) const;

  bool is_none(std::size_t arg) const;
  /// Value of an argument that is an integer or a bool.
  std::int64_t integer(std::size_t arg) const;
  /// The value of an integer argument, or `otherwise` if the argument is None.
  std::int64_t integer_or(std::size_t arg, std::int64_t otherwise) const;
  /// The value of a bool argument, or `otherwise` if the argument is None.
  bool boolean_or(std::size_t arg, bool otherwise) const;
  const DType& dtype(std::size_t arg) const;
  /// Value of an argument that is an integer, a bool or a double.
  double number(std::size_t arg) const;
  /// The values of an argument that is a list of integers. A single integer is a list of one
  /// integer, and None is an empty list.
  std::vector<std::int64_t> integers(std::size_t arg) const;
};

/// How one operator may be sharded, in the einsum style of GSPMD (Xu et al. 2021) and Shardy. Every
/// dimension of every tensor is an ordered list of factors, major first, whose sizes multiply to
/// the dimension's size. Sharding a factor shards each tensor that has the factor, over the same
/// mesh dimensions. Inputs without the factor are replicated. Outputs without the factor become
/// Partial if the factor has a reduction. A factor without a reduction must stay unsharded if an
/// output lacks the factor. For mm (m, k) x (k, n) -> (m, n) the factors are m, n and k, and k has
/// the reduction sum.
///
/// A rule describes one mesh dimension; propagate() applies it to a whole mesh. A value type.
struct ShardingRule : detail::LocalExecution {
  /// The size of an output's factor if the rule cannot know the size. Such a factor must stay
  /// unsharded.
  static constexpr std::int64_t kUnknown = -1;
  /// A factor: a part of one or several dimensions, of inputs and outputs, that are sharded
  /// together.
  struct Factor {
    std::int64_t size = 1;  ///< number of positions of the factor
    /// The reduction by which outputs without the factor become Partial. nullopt: the factor stays
    /// unsharded if an output lacks it.
    std::optional<ReduceOp> reduction = std::nullopt;
    /// Whether the factor's shards may differ in size. False if the result depends on equal sizes
    /// (a mean).
    bool allow_uneven = true;
    /// Whether a shard may be empty. False if the operator throws for an empty tensor (a maximum),
    /// because then only some ranks would throw.
    bool allow_empty = true;
    /// True if the factor must not be sharded although outputs have it (the dimension of a softmax
    /// or a sort).
    bool unsharded = false;
    /// Whether a shard must be one contiguous range of the factor (see offset_arguments).
    bool contiguous = false;
  };
  /// The factors of one tensor dimension. Empty for a dimension of size 1, which broadcasts, and
  /// for an input dimension that must stay unsharded and corresponds to no other dimension.
  using Factors = std::vector<int>;  ///< indices of factors, which refer to ShardingRule::factors
  using TensorFactors = std::vector<Factors>;  ///< the factors of all dimensions of one tensor

  std::vector<Factor> factors;
  /// Factors of each input tensor, one entry for each of OpCall::tensors.
  std::vector<TensorFactors> inputs;
  /// One entry for each returned tensor, with lists flattened, followed by one entry for each input
  /// that is written and not returned (the _foreach_..._ operators return nothing).
  std::vector<TensorFactors> outputs;

  /// Declares that the operator commutes with a reduction: if all of `partial_inputs` are
  /// Partial(op) over a mesh dimension, and the other inputs are replicated over it, then every
  /// output is Partial(op).
  struct Linear {
    std::vector<int> partial_inputs;
    ReduceOp op = ReduceOp::kSum;
  };
  std::vector<Linear> linear;

  /// Inputs that are added to the result of a reduction (the bias of addmm). If such an input lacks
  /// a sharded factor with a reduction, the input is made Partial with this reduction, so that the
  /// input is added once and not once for each rank.
  std::vector<int> additive;

  /// Inputs of which only sizes and type are read (the argument of zeros_like, the target of
  /// copy_). These inputs are never reduced. They are gathered only if the result has other local
  /// sizes.
  std::vector<int> unread;

  /// An argument that contains the sizes of an output, or the size of one of its dimensions. On
  /// each rank the argument is replaced by the local sizes.
  struct SizeArgument {
    int arg = 0;
    int output = 0;
    int dim = -1;  ///< index of the dimension whose size the argument contains; -1: the argument
                   ///< contains all sizes
    std::int64_t times = 1;  ///< the argument's value is this multiple of the dimension's size
  };
  std::vector<SizeArgument> size_arguments;

  /// Whether the operator draws random numbers. An unchanged random operator would draw the same
  /// numbers on every shard.
  bool random = false;
};

}  // namespace tessera

// Functions that add factors, broadcasting and linearity to a rule. Pure.
namespace tessera::rules {

using Sizes = std::vector<std::int64_t>;  ///< the sizes of a tensor, one for each dimension
using Factors = ShardingRule::Factors;    ///< the factors of a dimension, as indices
/// the factors of a tensor, one entry for each dimension
using TensorFactors = ShardingRule::TensorFactors;

// In this header, tensor indices refer to OpCall::tensors, and factor indices refer to
// ShardingRule::factors.

/// A sharding rule for `call` in which no dimension has a factor. The rule replicates all tensors
/// until factors are added.
ShardingRule start(const OpCall& call);

/// Adds a factor that may be sharded. Returns its index.
int add_factor(ShardingRule& rule, std::int64_t size);
/// Adds a factor that must not be sharded. Returns its index.
int add_unsharded(ShardingRule& rule, std::int64_t size);
/// Adds a factor of `size` positions. If the factor is sharded, outputs without the factor become
/// Partial(op). Returns the factor's index.
int add_reduced(ShardingRule& rule, std::int64_t size, ReduceOp op);
/// Adds a factor for each of `sizes`; these factors may be sharded. Returns the factors of a tensor
/// with `sizes`, one factor for each dimension.
TensorFactors add_factors(ShardingRule& rule, const Sizes& sizes);

/// Forbids sharding of all factors of a dimension.
void keep_unsharded(ShardingRule& rule, const Factors& factors);

/// Forbids empty shards of all factors that the rule has so far.
void forbid_empty_shards(ShardingRule& rule);

/// Declares that the operator is linear in `inputs` together: if all of them are Partial sums or
/// averages, the outputs are too.
void add_linear(ShardingRule& rule, std::vector<int> inputs);
/// Declares that the operator commutes with the given reductions of `inputs` together.
void add_linear(ShardingRule& rule, const std::vector<int>& inputs,
                std::initializer_list<ReduceOp> ops);
/// Declares linearity in a short notation for tables of operators: terms separated by blanks. A
/// term has the positions in `tensors` of the tensors that may be partial together, and a character
/// for the reductions:
///   "01"   sum and avg: linear in tensors 0 and 1 together
///   "0<"   max and min: monotone, not decreasing
///   "01^"  max;  "01v"  min
///   "0~"   avg: affine
///   "12*"  every reduction: elements are selected, not changed
void add_linear_terms(ShardingRule& rule, std::string_view terms, const std::vector<int>& tensors);

/// For each of `ndim` dimensions, whether the list argument `arg` names the dimension. All true if
/// the argument is None or empty.
std::vector<bool> named_dims(const OpCall& call, std::size_t arg, int ndim);

/// Gives `tensors` the factors of an operator that broadcasts them. Returns the factors of the
/// result, one entry for each dimension; nullopt if the sizes cannot be broadcast.
std::optional<TensorFactors> add_broadcast(ShardingRule& rule, const OpCall& call,
                                           const std::vector<int>& tensors);

/// The factors of tensor number `tensor` of the call, as a reference that the caller may write to.
inline TensorFactors& input_of(ShardingRule& rule, int tensor) {
  return rule.inputs[static_cast<std::size_t>(tensor)];
}

}  // namespace tessera::rules
TESSERA_API_END
