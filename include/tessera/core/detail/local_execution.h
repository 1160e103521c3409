#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// A tensor argument of an operator: its index in OpCall::tensors, or -1 for a None in a list.
struct TensorRef {
  int index = -1;
  friend bool operator==(const TensorRef&, const TensorRef&) = default;
};

/// An element type in a call, such as the target type of a cast, for a sharding rule.
struct DType {
  enum class Kind : std::uint8_t {
    kBool,
    kUnsigned,
    kSigned,
    kFloating,
    kComplex,
    kOther,  ///< quantised, packed or 8-bit floating-point types, and any other type
  };
  Kind kind = Kind::kOther;
  std::int64_t itemsize = 1;  ///< bytes of one element
  /// The number of the type in libtorch. No sharding rule reads this number.
  std::int64_t id = 0;
  friend bool operator==(const DType&, const DType&) = default;
};

/// An operator's argument, as a value that does not depend on libtorch. std::monostate stands for
/// None, or an argument that no sharding rule reads, such as a generator.
using Argument = std::variant<std::monostate, bool, std::int64_t, double, std::string, DType,
                              std::vector<std::int64_t>, TensorRef, std::vector<TensorRef>>;

}  // namespace tessera

namespace tessera::detail {

/// The part of a ShardingRule that determines how a rank runs the operator on its local tensors.
/// Used by the rules of the library's own operators.
struct LocalExecution {
  /// A call that each rank runs on its local tensors instead of the operator, because the operator
  /// depends on sizes that differ locally. For example, squeeze() becomes squeeze.dims, and a mean
  /// over a sharded dimension becomes a sum with `scale`. Propagation says whether to use this
  /// call. If so, ShardingRule::SizeArgument::arg is an index in `args`.
  struct LocalCall {
    /// An operation on a part of a tensor for which no operator exists. The layer dtensor
    /// implements the operation.
    enum class PartOperator : std::uint8_t {
      /// (weight, indices, first, rows): embedding, where `weight` contains the rows from `first`
      /// on of all `rows`. The result is zero for indices of other rows; an index that no part
      /// contains is an error.
      kEmbeddingRows,
      /// (self, dim, index, first, size): gather, where `self` contains the positions from `first`
      /// on of all `size` positions along `dim`. Zeros and errors are as for kEmbeddingRows.
      kGatherPart,
    };
    /// The name of an operator, with overload, or a part operator.
    std::variant<std::string_view, PartOperator> op;
    std::vector<Argument> args;
    double scale = 1.0;  ///< factor by which the local results are multiplied
    /// The local call is used only if one of these factors is sharded. If the list is empty, the
    /// local call is always used.
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

  /// An argument that says which elements of input `input` this rank has: a list of integers. The
  /// list is empty if the rank has all elements. Otherwise the list is flat_place() of the rank's
  /// part (layout_math.h).
  struct PlaceArgument {
    int arg = 0;
    int input = 0;
  };
  std::vector<PlaceArgument> place_arguments;

  /// Output `output` is written into input `input` (in-place and out= variants). If propagate()
  /// finds another layout for the output than the input's, the result is redistributed to the
  /// input's layout and copied into the input's local tensor. This never needs a collective,
  /// because the result is replicated in this case.
  struct Inplace {
    int input = 0;
    int output = 0;
  };
  std::vector<Inplace> inplace;

  /// Tensors whose layouts are chosen together. An empty list of groups stands for a single group
  /// with all tensors. A list operator (_foreach_add_) has one group for each position of its
  /// lists. Inputs and outputs in no group are replicated, and the rule does not know the sizes of
  /// such outputs (the seeds that attention returns).
  struct TensorGroup {
    std::vector<int> inputs;
    std::vector<int> outputs;
  };
  std::vector<TensorGroup> groups;
};

}  // namespace tessera::detail
TESSERA_API_END
