// The properties of an operator that dispatch needs.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "random/fills.h"
#include "tessera/core/detail/rule_functions.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::detail {

/// A property of an operator that neither its schema nor its sharding rule contains.
enum class Trait : std::uint8_t {
  // How the operator is run:
  kRandomInplace,    ///< a random operator that fills its tensor by global element (run_local.h)
  kNativeDropout,    ///< dropout that draws by global element (run_local.h)
  kForeach,          ///< a foreach operator: takes lists; each position is a separate call
  kWritesGradients,  ///< gradient formulas write to zeros with it (fallback.cpp)
  kNewZeros,         ///< makes the zeros that gradient formulas write to
  kOwnKernel,        ///< has a kernel in src/dtensor/overrides/ instead of a plan
  kHelperTensors,    ///< composed of other operators and of plain tensors that it makes itself
                     ///< (composite_kernels.cpp)
  // Properties of the operator's arguments and results:
  kViewsMemory,    ///< its storage_offset refers to the memory of its input (views.h)
  kInfersSize,     ///< takes sizes, one of which may be -1
  kUnsafeView,     ///< its result need not be an alias: an input that cannot be viewed is copied
  kLeavesMemory,   ///< returns uninitialised memory
  kReadsOneValue,  ///< returns one value to the host, so strict scopes permit its reduction, in the
                   ///< lowering if it has one
  // Numbers that must not be applied to the terms of a sum one by one:
  kNumberBesideSum,  ///< no number: the operator does not multiply the sum by its number
  kDivides,          ///< a divisor: zero as well as infinity
  // When the operator throws:
  kFailsByMatrix,   ///< may throw for a matrix that it cannot factorise, even without check_errors
  kFailsByElement,  ///< may throw for an invalid index or value, which may be on one rank only
};

/// The traits of one operator, from the tables.
class OperatorTraits {
 public:
  /// `name`: "aten::add.Tensor"; it is looked up in the table in operator_info.cpp.
  explicit OperatorTraits(std::string_view name);

  bool has(Trait trait) const { return (traits_ >> static_cast<unsigned>(trait) & 1U) != 0; }

  /// For kWritesGradients: the functional form of the operator, without "aten::".
  std::string_view functional() const { return functional_; }
  /// For kRandomInplace: the function that draws the numbers.
  RandomFill fill() const { return fill_; }

 private:
  std::uint32_t traits_ = 0;
  std::string_view functional_;
  RandomFill fill_ = nullptr;
};

/// A row of the table of traits.
struct TraitRow {
  Trait trait;
  /// Operators without "aten::", separated by blanks. "mul_.Tensor" is one overload; "mul_.*" is
  /// every overload of mul_; "_foreach_*" is every operator with this prefix.
  std::string_view names;
  std::string_view functional = {};
};
std::span<const TraitRow> trait_rows();

/// The names in a row, as a list.
std::vector<std::string> names_in(const TraitRow& row);
/// Whether `pattern`, one of a row's names, matches the operator `name`, without "aten::".
bool covers(std::string_view pattern, std::string_view name);

/// Properties of an operator for dispatch: its schema, read once, and its entries in the tables.
struct OperatorInfo {
  enum class ArgumentKind : std::uint8_t {
    kTensor,              ///< schema types Tensor and Tensor?
    kTensorList,          ///< schema type Tensor[]
    kOptionalTensorList,  ///< schema type Tensor?[]
    kScalar,              ///< a number that no rule reads; a call's cache key contains only its
                          ///< type
    kDType,               ///< schema types ScalarType and ScalarType?
    kGenerator,           ///< a random generator; a call's cache key contains only whether there is
                          ///< one
    kNumberList,          ///< a list of numbers; a call's cache key contains only their types
    kStatic,              ///< any other value; a call's cache key contains it
  };
  struct Return {
    bool is_tensor = false;  ///< whether the result is a tensor or a list of tensors
    int written = -1;        ///< the argument that is returned (in-place, out=), or -1
  };

  explicit OperatorInfo(const c10::OperatorHandle& op);

  std::string name;  ///< full name: "aten::add.Tensor"; "aten::mm" if there is no overload
  /// The kind of each argument, in schema order.
  std::vector<ArgumentKind> arguments;
  std::vector<Return> returns;
  std::vector<int> written;  ///< indices of the arguments that the operator writes to
  int viewed = -1;           ///< index of the argument that the results are views of, or -1
  // Indices of the arguments with these names, or -1.
  int device = -1;
  int generator = -1;
  int check_errors = -1;    ///< a factorisation throws only if this argument is true
  int stride = -1;          ///< a tensor's stride in memory, not a convolution's
  int storage_offset = -1;  ///< offset in the memory of the input, for Trait::kViewsMemory
  bool takes_tensors = false;
  bool decomposes = false;     ///< CompositeImplicitAutograd: composed of other operators
  bool changes_shape = false;  ///< changes the shape of an argument in place (t_, squeeze_)
  bool draws_random = false;
  bool is_own = false;        ///< belongs to another library, so autograd may not know it
  bool writes_lists = false;  ///< whether it is like _foreach_add_: writes to its first list and
                              ///< returns nothing

  // The entries of the tables for this operator. `rule` is null for an operator without a rule.
  OperatorTraits traits;
  std::optional<c10::OperatorHandle> functional;  ///< the functional form: see
                                                  ///< OperatorTraits::functional
  RuleFunction rule;

  bool is_list(std::size_t argument) const {
    return arguments[argument] == ArgumentKind::kTensorList ||
           arguments[argument] == ArgumentKind::kOptionalTensorList;
  }
  bool is_written(std::size_t argument) const;
};

/// The properties of `op`. The reference is valid until the process ends.
const OperatorInfo& operator_info(const c10::OperatorHandle& op);

/// The operator with a name like "aten::add.Tensor". Throws c10::Error if it does not exist.
c10::OperatorHandle find_operator(std::string_view name);

}  // namespace tessera::detail
TESSERA_API_FOR_TEST_END
