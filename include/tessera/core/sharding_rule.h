// Calls of operators, their sharding rules, and functions for writing rules (register_rule.h).
#pragma once

#include <cstddef>
#include <cstdint>
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

/// A call of an operator on distributed tensors. `args`: all arguments of the schema in order, with
/// keyword-only arguments, `out` and default values. A tensor that is passed twice is in `tensors`
/// twice.
///
/// The parameter `arg` of the member functions is an index in `args`. An index past the end counts
/// as None. Throws Error for an argument of another type.
struct OpCall {
  std::string_view op;  ///< full name: "aten::add.Tensor", or "aten::mm" without overload
  std::vector<Argument> args;
  std::vector<TensorMeta> tensors;

  bool has_tensor(std::size_t arg) const;  ///< whether argument `arg` is a tensor
  /// Returns the index in `tensors` of tensor argument `arg`.
  int tensor_index(std::size_t arg) const;
  const TensorMeta& tensor(std::size_t arg) const;
  /// Returns the tensors of a list argument. A single tensor counts as a list of one tensor, and
  /// None as an empty list.
  std::vector<TensorRef> tensor_list(std::size_t arg) const;

  bool is_none(std::size_t arg) const;
  /// Returns the value of an argument that is an integer or a bool.
  std::int64_t integer(std::size_t arg) const;
  /// Returns the value of an integer argument, or `otherwise` if the argument is None.
  std::int64_t integer_or(std::size_t arg, std::int64_t otherwise) const;
  /// Returns the value of a bool argument, or `otherwise` if the argument is None.
  bool boolean_or(std::size_t arg, bool otherwise) const;
  const DType& dtype(std::size_t arg) const;
  /// Returns the value of an argument that is an integer, a bool or a double.
  double number(std::size_t arg) const;
  /// Returns the values of an argument that is a list of integers. A single integer counts as a
  /// list of one integer, and None as an empty list.
  std::vector<std::int64_t> integers(std::size_t arg) const;
};

/// How one operator may be sharded over one mesh dimension, in the einsum style of GSPMD (Xu et al.
/// 2021). A factor is an index letter of the einsum. Every tensor dimension is a list of factors,
/// outermost first, whose sizes multiply to the dimension's size. For mm, (m, k) x (k, n) -> (m,
/// n), the factors are m, n and k.
///
/// If a factor is sharded, all tensors with the factor are sharded alike. Inputs without the factor
/// are replicated. Outputs without the factor become Partial by the factor's reduction (sum for k).
/// A factor without a reduction must then not be sharded.
struct ShardingRule : detail::LocalExecution {
  /// Stands for the size of an output's factor (einsum index letter) if the rule cannot know the
  /// size. Such a factor must not be sharded.
  static constexpr std::int64_t kUnknown = -1;
  /// An einsum index letter: dimensions of inputs and outputs (or parts of dimensions) that have
  /// the same factor are sharded together.
  struct Factor {
    std::int64_t size = 1;  ///< number of positions of the factor (index letter)
    /// The reduction by which outputs without the factor (einsum index letter) become Partial.
    /// nullopt: the factor must not be sharded if an output lacks the factor.
    std::optional<ReduceOp> reduction = std::nullopt;
    /// Whether the shards of the factor (einsum index letter) may differ in size. False if the
    /// result depends on equal sizes (as a mean does).
    bool allow_uneven = true;
    /// Whether a shard of the factor may be empty. False if the operator throws for an empty tensor
    /// (a maximum), because then only some ranks would throw.
    bool allow_empty = true;
    /// True if the factor (einsum index letter) must not be sharded although outputs have the
    /// factor (the dimension of a softmax or a sort).
    bool unsharded = false;
    /// Whether a shard must be one contiguous range of the factor's positions (OffsetArgument).
    bool contiguous = false;
  };
  /// The factors (einsum index letters) of a tensor dimension, as indices in ShardingRule::factors.
  /// Empty for dimensions broadcast from size 1, and for unshardable dimensions of one input only.
  using Factors = std::vector<int>;
  using TensorFactors = std::vector<Factors>;  ///< the factors (index letters) of each dimension

  std::vector<Factor> factors;
  /// Factors (einsum index letters) of each input tensor, one entry for each of OpCall::tensors.
  std::vector<TensorFactors> inputs;
  /// Factors (index letters) of each output: of the returned tensors (each tensor of a returned
  /// list counts), then of the inputs that are written but not returned.
  std::vector<TensorFactors> outputs;

  /// Declares that the operator commutes with reduction `op`. If all `partial_inputs` are
  /// Partial(op) and all other inputs are replicated, every output is Partial(op).
  struct Linear {
    std::vector<int> partial_inputs;
    ReduceOp op = ReduceOp::kSum;
  };
  std::vector<Linear> linear;

  /// Inputs that are added to the result of a sum, such as the bias of addmm. If the summed factor
  /// is sharded, such an input is made Partial, so that the input is added only once.
  std::vector<int> additive;
};

}  // namespace tessera

// Functions that add factors (einsum index letters) to a sharding rule.
namespace tessera::rules {

// Factors (einsum index letters) are given as indices in ShardingRule::factors.

/// Returns a sharding rule for `call` in which no tensor dimension has a factor (index letter).
/// Such a rule replicates all tensors; the caller adds factors.
ShardingRule start(const OpCall& call);

/// Adds a factor (einsum index letter) that may be sharded. Returns the factor's index.
int add_factor(ShardingRule& rule, std::int64_t size);
/// Adds a factor (einsum index letter) that must not be sharded. Returns the factor's index.
int add_unsharded(ShardingRule& rule, std::int64_t size);
/// Adds a factor (einsum index letter) that is reduced: if the factor is sharded, outputs without
/// the factor become Partial(op). Returns the factor's index.
int add_reduced(ShardingRule& rule, std::int64_t size, ReduceOp op);
/// For each of `sizes`, adds a factor (einsum index letter) that may be sharded. Returns the
/// factors of a tensor with `sizes`, one factor for each dimension.
ShardingRule::TensorFactors add_factors(ShardingRule& rule, const std::vector<std::int64_t>& sizes);

}  // namespace tessera::rules
TESSERA_API_END
