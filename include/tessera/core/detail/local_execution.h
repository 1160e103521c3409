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

/// An operator's argument of type Tensor: an index in `OpCall::tensors`, or -1 for None in a list.
struct TensorRef {
  int index = -1;
  friend bool operator==(const TensorRef&, const TensorRef&) = default;
};

/// A dtype argument of an operator, such as the target dtype of a cast.
struct DType {
  enum class Kind : std::uint8_t {
    kBool,
    kUnsigned,
    kSigned,
    kFloating,
    kComplex,
    kOther,  ///< all other dtypes: quantised, packed, 8-bit floating-point, ...
  };
  Kind kind = Kind::kOther;
  std::int64_t itemsize = 1;  ///< number of bytes of an element of this dtype
  /// The dtype's value in libtorch's at::ScalarType. No sharding rule reads this value.
  std::int64_t id = 0;
  friend bool operator==(const DType&, const DType&) = default;
};

/// An operator's argument, as a type that does not need libtorch. std::monostate stands for None,
/// and for an argument that no sharding rule reads, such as a generator.
using Argument = std::variant<std::monostate, bool, std::int64_t, double, std::string, DType,
                              std::vector<std::int64_t>, TensorRef, std::vector<TensorRef>>;

}  // namespace tessera

namespace tessera::detail {

/// The part of a ShardingRule that says how a rank runs the operator on its local tensors. Rules
/// that programs register rarely need this part.
struct LocalExecution {
  /// A call that replaces the operator on local tensors. Needed if the operator would read local
  /// sizes in place of global sizes. For example, a mean over a sharded dimension becomes a sum
  /// with `scale`. If Propagation::use_local_call is true, SizeArgument::arg is an index in `args`.
  struct LocalCall {
    /// An operation on one rank's shard for which libtorch has no operator (implemented in
    /// src/dtensor).
    enum class PartOperator : std::uint8_t {
      /// Embedding (weight, indices, first, rows): `weight` is the shard of a table of `rows` rows
      /// that begins at row `first`. Results for rows of other shards are zero. An index outside
      /// [0, rows) is an error.
      kEmbeddingRows,
      /// Gather (self, dim, index, first, size): `self` is the shard that begins at position
      /// `first` of the `size` positions of `dim`. Results for indices in other shards are zero.
      kGatherPart,
    };
    /// The full name of an operator ("aten::sum"), or a PartOperator.
    std::variant<std::string_view, PartOperator> op;
    std::vector<Argument> args;
    double scale = 1.0;  ///< factor by which each rank's local results are multiplied
    /// Factors (einsum index letters). The local call is used only if a factor in this list is
    /// sharded. If the list is empty, the local call is always used.
    std::vector<int> when_split = {};
  };
  std::optional<LocalCall> local_call;

  /// An argument that contains the sizes of an output, or the size of one output dimension. On each
  /// rank the argument is replaced by local sizes.
  struct SizeArgument {
    int arg = 0;
    int output = 0;
    int dim = -1;  ///< dimension whose size the argument contains; -1: all sizes of the output
    std::int64_t times = 1;  ///< the argument is the dimension's size multiplied by this number
  };
  std::vector<SizeArgument> size_arguments;

  /// Inputs of which the operator reads only sizes and dtype, such as the argument of zeros_like.
  /// Such inputs are never reduced, and are redistributed only if the local sizes of the result
  /// differ.
  std::vector<int> unread;

  /// Whether the operator draws random numbers. Such an operator cannot run unchanged on local
  /// tensors, because every shard would get the same numbers.
  bool random = false;

  /// An argument of `local_call` that is a global index: where this rank's shard of input `input`
  /// begins along dimension `dim`. Factor::contiguous must be set for this dimension.
  struct OffsetArgument {
    int arg = 0;
    int input = 0;
    int dim = 0;
  };
  std::vector<OffsetArgument> offset_arguments;

  /// An argument that says which elements of input `input` this rank has: flat_place()
  /// (layout_math.h), or an empty list for all elements.
  struct PlaceArgument {
    int arg = 0;
    int input = 0;
  };
  std::vector<PlaceArgument> place_arguments;

  /// States that output `output` is written into input `input` (in-place and out= variants). If the
  /// output cannot have the input's layout, the output is replicated, and each rank copies its
  /// slice.
  struct Inplace {
    int input = 0;
    int output = 0;
  };
  std::vector<Inplace> inplace;

  /// Tensors of a call whose layouts are chosen together. Without `groups`, all tensors are one
  /// TensorGroup. Tensors in no TensorGroup are replicated, and the sizes of such outputs may be
  /// unknown.
  struct TensorGroup {
    std::vector<int> inputs;
    std::vector<int> outputs;
  };
  std::vector<TensorGroup> groups;
};

}  // namespace tessera::detail
TESSERA_API_END
