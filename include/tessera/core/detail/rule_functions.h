// The table of sharding rules, and propagation: the choice of layouts for one operator call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/detail/layout.h"
#include "tessera/core/sharding_rule.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The sharding rule of one operator, as a pure function of a call. Returns nullopt for a call that
/// the rule does not cover. A null RuleFunction: the operator has no rule.
class RuleFunction {
 public:
  using Body = std::function<std::optional<ShardingRule>(const OpCall&)>;
  /// A sharding rule, and whether the rule depends on the values of Scalar and float arguments.
  struct Entry {
    Body body;
    bool reads_numbers = false;
  };

  RuleFunction(std::nullptr_t = nullptr) {}
  explicit RuleFunction(const Entry* entry) : entry_(entry) {}

  explicit operator bool() const { return entry_ != nullptr; }
  std::optional<ShardingRule> operator()(const OpCall& call) const;
  /// Whether the rule depends on the values of Scalar and float arguments, such as the order of a
  /// norm. If so, the key of a cached call plan contains these values.
  bool reads_numbers() const { return entry_ != nullptr && entry_->reads_numbers; }

 private:
  const Entry* entry_ = nullptr;
};

/// Returns the rule of operator `op` ("aten::add.Tensor"): the program's rule (register_rule.h),
/// else the library's rule from the tables in src/core/rules/. Thread safe.
RuleFunction find_rule(std::string_view op);

/// The operators of one table of sharding rules ("pointwise", "matmul"), sorted by name.
struct RuleFamily {
  std::string_view name;
  std::vector<std::string_view> operators;
};
/// Returns all tables of the library's sharding rules, in a fixed order.
std::vector<RuleFamily> rule_families();
/// Returns the names of all operators for which the library has a sharding rule, sorted.
std::vector<std::string_view> ruled_operators();
/// Returns the names of all operators for which a program has registered a rule, sorted.
std::vector<std::string> user_ruled_operators();

/// The result of propagate() for one operator call.
struct Propagation {
  /// The layout to which each input must be redistributed. An input whose values are not read keeps
  /// its layout. nullptr: a plain tensor that stays plain.
  std::vector<LayoutPtr> inputs;
  /// The layout of each output. nullptr for an output that is in no TensorGroup: such an output is
  /// replicated, and has the sizes of the local result.
  std::vector<LayoutPtr> outputs;
  /// The global sizes of each output. A negative size is unknown to the rule. A dimension of
  /// unknown size is unsharded.
  std::vector<std::vector<std::int64_t>> output_sizes;
  /// Whether ShardingRule::local_call must run instead of the operator.
  bool use_local_call = false;
};

/// Chooses the cheapest layouts for a call with `rule` and input layouts `inputs`. nullptr: a plain
/// tensor, which counts as replicated. Greedy over mesh dimensions, outermost first: prefers no
/// communication, then the fewest bytes, then the layout of the largest input. Pure and thread
/// safe. Throws Error for different meshes, or layouts that do not fit the tensors.
Propagation propagate(const ShardingRule& rule, const OpCall& call,
                      std::span<const LayoutPtr> inputs);

}  // namespace tessera

namespace tessera::rules {

// In namespace tessera::rules, tensors are given as indices in OpCall::tensors, and factors (einsum
// index letters) as indices in ShardingRule::factors.

using Sizes = std::vector<std::int64_t>;  ///< the sizes of a tensor, one for each dimension
using Factors = ShardingRule::Factors;    ///< the factors (index letters) of one dimension
/// The factors (einsum index letters) of a tensor, one list for each dimension.
using TensorFactors = ShardingRule::TensorFactors;

/// Forbids sharding of the given factors (einsum index letters) of a tensor dimension.
void keep_unsharded(ShardingRule& rule, const Factors& factors);

/// Returns the factors (einsum index letters) of input `tensor`, by reference.
inline TensorFactors& input_of(ShardingRule& rule, int tensor) {
  return rule.inputs[static_cast<std::size_t>(tensor)];
}

/// Forbids empty shards for every factor (einsum index letter) that was already added to `rule`.
void forbid_empty_shards(ShardingRule& rule);

}  // namespace tessera::rules

namespace tessera::detail {

/// Registers the rule of an operator that another component of Tessera (src/dtensor, for example)
/// defines. A program can replace the rule by register_rule(). Must be called before main().
void add_library_rule(const std::string& op, RuleFunction::Body body, bool reads_numbers = false);

}  // namespace tessera::detail
TESSERA_API_END
