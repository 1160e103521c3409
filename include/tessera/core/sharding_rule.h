#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/core/detail/local_execution.h"
#include "tessera/core/op_call.h"
#include "tessera/core/placement.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

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
TESSERA_API_END
