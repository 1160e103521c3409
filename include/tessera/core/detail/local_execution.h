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
  /// A call that each rank runs on its local tensors instead of the operator, which would read
  /// local sizes where it needs global sizes. For example, squeeze() becomes squeeze.dims, and a
  /// mean over a sharded dimension becomes a sum with `scale`. Propagation::use_local_call says
  /// whether to use this call. If the call is used, SizeArgument::arg is an index in `args`.
  struct LocalCall {
    /// An operation on one rank's shard for which libtorch has no operator (implemented in
    /// src/dtensor).
    enum class PartOperator : std::uint8_t {
      /// Embedding with arguments (weight, indices, first, rows): `weight` is a shard of a table of
      /// `rows` rows and begins at row `first`. The result is zero for indices of rows in other
      /// shards. An index outside of [0, rows) is an error.
      kEmbeddingRows,
      /// Gather with arguments (self, dim, index, first, size): the shard `self` begins at position
      /// `first` of the `size` positions of `dim`. The result is zero for indices in other shards.
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

  /// Inputs of which the operator reads only sizes and dtype (the argument of zeros_like, the
  /// target of copy_). Such inputs are never reduced, and are redistributed only if the local sizes
  /// of the result differ from the input's local sizes.
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

  /// An argument that says which elements of input `input` this rank has. The argument is an empty
  /// list if the rank has all elements, otherwise the result of flat_place() (layout_math.h).
  struct PlaceArgument {
    int arg = 0;
    int input = 0;
  };
  std::vector<PlaceArgument> place_arguments;

  /// States that output `output` is written into input `input` (in-place and out= variants). If the
  /// output cannot have the input's layout, the operator computes a replicated output. Each rank
  /// then copies its slice to the local tensor of the input, without a collective.
  struct Inplace {
    int input = 0;
    int output = 0;
  };
  std::vector<Inplace> inplace;

  /// Tensors of a call whose layouts are chosen together. With an empty list `groups`, all tensors
  /// of the call form one TensorGroup. Tensors in no TensorGroup are replicated. An output in no
  /// TensorGroup (such as the seeds that attention returns) may have sizes unknown to the rule.
  struct TensorGroup {
    std::vector<int> inputs;
    std::vector<int> outputs;
  };
  std::vector<TensorGroup> groups;
};

}  // namespace tessera::detail
TESSERA_API_END
