#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <vector>

#include "tessera/core/sharding_rule.h"

namespace tessera::detail {

/// What the fallback needs to know of an operator, read from its schema once.
struct OperatorInfo {
  enum class ArgumentKind : std::uint8_t {
    kTensor,              ///< Tensor, Tensor?
    kTensorList,          ///< Tensor[]
    kOptionalTensorList,  ///< Tensor?[]
    kScalar,              ///< a number that no rule reads: of the key of a call, only its type
    kStatic,              ///< anything else that a call is looked up by
    kIgnored,             ///< a generator, a list of numbers
  };
  struct Return {
    bool is_tensor = false;  ///< or a list of them
    int written = -1;        ///< the argument that is returned (in-place, out=), or -1
  };

  explicit OperatorInfo(const c10::OperatorHandle& op);

  std::string name;  ///< "aten::add.Tensor"; "aten::mm" where there is no overload
  std::vector<ArgumentKind> arguments;
  std::vector<Return> returns;
  std::vector<int> written;  ///< arguments that the operator writes to
  int viewed = -1;           ///< the argument that the results are views of, or -1
  int device = -1;           ///< argument `device`, or -1
  int stride = -1;           ///< argument `stride` of a tensor's memory, or -1
  int storage_offset = -1;   ///< argument `storage_offset` of a view of memory, or -1
  int generator = -1;        ///< argument `generator`, or -1
  bool takes_tensors = false;
  bool decomposes = false;     ///< CompositeImplicitAutograd: written in terms of other operators
  bool unsafe_view = false;    ///< _unsafe_view (see viewable.h)
  bool changes_shape = false;  ///< changes the shape of an argument in place (t_, squeeze_)
  bool draws_random = false;
  bool fails_by_value = false;  ///< throws for a matrix that it cannot factorise
  bool fails_by_part = false;   ///< throws for an index or a number that only some parts may hold
  int check_errors = -1;        ///< the argument without which it does not, or -1
  bool makes_zeros = false;     ///< new_zeros, zeros_like (see fresh_tensor.h)
  /// Of an operator that formulas of gradients write with: what returns the result instead.
  std::optional<c10::OperatorHandle> functional;
  RuleFunction rule;
};

/// Of `op`, from a table that lives as long as the program.
const OperatorInfo& operator_info(const c10::OperatorHandle& op);

}  // namespace tessera::detail
