// The properties of an operator.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "random/fills.h"
#include "tessera/core/sharding_rule.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::detail {

/// A property of an operator that neither its schema nor its sharding rule has.
enum class Trait : std::uint8_t {
  // How it is run.
  kRandomInplace,    ///< fills its tensor by the global element (run_local.h)
  kNativeDropout,    ///< drops by the global element (run_local.h)
  kForeach,          ///< takes lists; each position is a separate call
  kWritesGradients,  ///< formulas of gradients write with it (fallback.cpp)
  kNewZeros,         ///< makes the zeros that they write to
  kOwnKernel,        ///< has a kernel of ours in src/dtensor/overrides/ instead of a plan
  kHelperTensors,    ///< composed of others and of its own plain tensors (composite_kernels.cpp)
  // The kinds of its arguments and results.
  kViewsMemory,    ///< its storage_offset counts in the memory of what it views (views.h)
  kInfersSize,     ///< takes sizes; one of them may be -1
  kUnsafeView,     ///< promises no alias: what cannot be viewed is copied
  kLeavesMemory,   ///< its result is memory for others to write
  kReadsOneValue,  ///< answers the host: what it reduces for that counts as written, where it has a
                   ///< form only in that form
  // Which numbers may not be applied to the terms of a sum one by one.
  kNumberBesideSum,  ///< none: a number of it stands beside the sum
  kDivides,          ///< zero as well as infinity
  // When it throws.
  kFailsByMatrix,   ///< for a matrix that it cannot factorise, without being asked to check
  kFailsByElement,  ///< for an index out of range or another bad number that one part may hold
};

/// The traits of one operator, from the tables.
class OperatorTraits {
 public:
  /// `name`: "aten::add.Tensor", looked up in the table in operator_info.cpp.
  explicit OperatorTraits(std::string_view name);

  bool has(Trait trait) const { return (traits_ >> static_cast<unsigned>(trait) & 1U) != 0; }

  /// For kWritesGradients: the operator that returns the result instead, without "aten::".
  std::string_view functional() const { return functional_; }
  /// For kRandomInplace.
  RandomFill fill() const { return fill_; }

 private:
  std::uint32_t traits_ = 0;
  std::string_view functional_;
  RandomFill fill_ = nullptr;
};

/// A row of the table.
struct TraitRow {
  Trait trait;
  /// Operators without "aten::", separated by blanks: "mul_.Tensor"; "mul_.*" is mul_ in all its
  /// overloads; "_foreach_*" is whatever begins so.
  std::string_view names;
  std::string_view functional = {};
  RandomFill fill = nullptr;
};
std::span<const TraitRow> trait_rows();

/// The names of a row, one by one.
std::vector<std::string> names_in(const TraitRow& row);
/// Whether `pattern`, one of those, covers operator `name`, without "aten::".
bool covers(std::string_view pattern, std::string_view name);

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

  // The entries of the tables for the name above. `rule` is null for an operator without a rule.
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
