#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <vector>

#include "operators/operator_traits.h"
#include "tessera/core/sharding_rule.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::detail {

/// Properties of an operator for dispatch: its schema, read once, and its entries in the tables.
struct OperatorInfo {
  enum class ArgumentKind : std::uint8_t {
    kTensor,              ///< Tensor, Tensor?
    kTensorList,          ///< Tensor[]
    kOptionalTensorList,  ///< Tensor?[]
    kScalar,              ///< a number that no rule reads; a call's key has its type only
    kDType,               ///< ScalarType, ScalarType?
    kGenerator,           ///< a call's key has only whether there is one
    kNumberList,          ///< a call's key has only the numbers' types
    kStatic,              ///< anything else that a call is looked up by
  };
  struct Return {
    bool is_tensor = false;  ///< or a list of them
    int written = -1;        ///< the argument that is returned (in-place, out=), or -1
  };

  explicit OperatorInfo(const c10::OperatorHandle& op);

  std::string name;  ///< "aten::add.Tensor"; "aten::mm" where there is no overload
  /// The kind of each argument, in schema order.
  std::vector<ArgumentKind> arguments;
  std::vector<Return> returns;
  std::vector<int> written;  ///< arguments that the operator writes to
  int viewed = -1;           ///< the argument that the results are views of, or -1
  // Arguments of these names, or -1.
  int device = -1;
  int generator = -1;
  int check_errors = -1;    ///< a factorisation throws only if it is true
  int stride = -1;          ///< a tensor's stride in memory, not a convolution's
  int storage_offset = -1;  ///< in the memory that Trait::kViewsMemory views
  bool takes_tensors = false;
  bool decomposes = false;     ///< CompositeImplicitAutograd: written in terms of other operators
  bool changes_shape = false;  ///< changes the shape of an argument in place (t_, squeeze_)
  bool draws_random = false;
  bool is_own = false;  ///< another library's: autograd need not know it
  bool writes_lists =
      false;  ///< _foreach_add_ and its like: writes to its first list, returns nothing

  // What the tables say, found by the name above. `rule` is null for an operator without one.
  OperatorTraits traits;
  std::optional<c10::OperatorHandle> functional;  ///< see OperatorTraits::functional
  RuleFunction rule;

  bool is_list(std::size_t argument) const {
    return arguments[argument] == ArgumentKind::kTensorList ||
           arguments[argument] == ArgumentKind::kOptionalTensorList;
  }
  bool is_written(std::size_t argument) const;
};

/// The properties of `op`, from a table that lives as long as the program.
const OperatorInfo& operator_info(const c10::OperatorHandle& op);

/// The operator "aten::add.Tensor". Throws c10::Error where there is none.
c10::OperatorHandle find_operator(std::string_view name);

}  // namespace tessera::detail
TESSERA_API_FOR_TEST_END
