#include <range/v3/range/conversion.hpp>
#include <range/v3/view/iota.hpp>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "propagate/propagate_choice.h"
#include "rules/rule_table.h"
#include "tessera/core/error.h"
#include "tessera/core/register_rule.h"
#include "tessera/core/rule_builder.h"
#include "tessera/core/sharding_rule.h"

namespace tessera {

// Turns a user's list of accepted placements into a rule of factors. An entry that shards
// dimensions becomes one factor, which those dimensions share; an entry with Partial inputs becomes
// a Linear.

namespace {

using SizesOfEach = std::vector<std::vector<std::int64_t>>;

/// Builds the rule of one call, entry by entry.
class AcceptedRule {
 public:
  AcceptedRule(const OpCall& call, const SizesOfEach& results)
      : call_(call), rule_(rules::start(call)) {
    for (const auto& sizes : results) {
      rule_.outputs.emplace_back(sizes.size());
    }
    for (const auto& tensor : call.tensors) {
      input_sizes_.push_back(tensor.sizes);
    }
    output_sizes_ = results;
  }

  void add(const AcceptedPlacements& row) {
    const bool fits =
        row.inputs.size() == rule_.inputs.size() && row.outputs.size() == rule_.outputs.size();
    TESSERA_CHECK(fits, "the rule registered for ", call_.op, " accepts ", row.inputs.size(),
                  " inputs and ", row.outputs.size(), " results, the call has ",
                  rule_.inputs.size(), " and ", rule_.outputs.size(),
                  ": give a placement for each tensor");
    const bool shards = std::any_of(row.inputs.begin(), row.inputs.end(),
                                    [](const auto& placement) { return is_shard(placement); });
    shards ? add_sharded(row) : add_linear(row);
  }

  ShardingRule finish() && {
    fill(rule_.inputs, input_sizes_);
    fill(rule_.outputs, output_sizes_);
    return std::move(rule_);
  }

 private:
  void add_sharded(const AcceptedPlacements& row) {
    // The factor is made at the first dimension that the entry names, when its size is known.
    factor_ = -1;
    for (std::size_t i = 0; i < row.inputs.size(); ++i) {
      if (const auto* shard = std::get_if<Shard>(&row.inputs[i])) {
        name(rule_.inputs[i], input_sizes_[i], shard->dim);
      } else {
        check(is_replicate(row.inputs[i]), "mixes Shard with Partial inputs");
      }
    }
    for (std::size_t o = 0; o < row.outputs.size(); ++o) {
      if (const auto* shard = std::get_if<Shard>(&row.outputs[o])) {
        name(rule_.outputs[o], output_sizes_[o], shard->dim);
        continue;
      }
      // An output without Shard lacks the factor, so a rule can only make it partial.
      const auto* partial = std::get_if<Partial>(&row.outputs[o]);
      check(partial != nullptr, "makes a replicated result of sharded inputs");
      auto& reduction = rule_.factors[static_cast<std::size_t>(factor_)].reduction;
      check(!reduction || *reduction == partial->op, "makes results with different reductions");
      reduction = partial->op;
    }
  }

  /// Adds an entry without Shard: inputs that may be partial together, or all replicated.
  void add_linear(const AcceptedPlacements& row) {
    std::vector<int> inputs;
    std::optional<ReduceOp> op;
    for (std::size_t i = 0; i < row.inputs.size(); ++i) {
      const auto* partial = std::get_if<Partial>(&row.inputs[i]);
      if (partial == nullptr) {
        continue;
      }
      check(!op || *op == partial->op, "has inputs with different reductions");
      op = partial->op;
      inputs.push_back(static_cast<int>(i));
    }
    const Placement wanted = op ? Placement(Partial{*op}) : Placement(Replicate{});
    check(std::all_of(row.outputs.begin(), row.outputs.end(),
                      [&](const auto& placement) { return placement == wanted; }),
          "must make each result as partial as its inputs are");
    if (op) {
      rule_.linear.push_back({std::move(inputs), *op});
    }
  }

  /// Gives a dimension the factor of the entry. A dimension has one factor here, so if two entries
  /// shard the same dimension, the operator needs a rule of factors.
  void name(ShardingRule::TensorFactors& tensor, const std::vector<std::int64_t>& sizes,
            std::int64_t dim) {
    const auto at =
        static_cast<std::size_t>(rules::wrap_dim(call_, dim, static_cast<int>(sizes.size())));
    if (factor_ < 0) {
      factor_ = rules::add_factor(rule_, sizes[at]);
    }
    check(tensor[at].empty(), "shards a dimension that another entry shards");
    check(rule_.factors[static_cast<std::size_t>(factor_)].size == sizes[at],
          "shards dimensions of different sizes together");
    tensor[at] = {factor_};
  }

  void fill(std::vector<ShardingRule::TensorFactors>& tensors, const SizesOfEach& sizes) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      for (std::size_t dim = 0; dim < tensors[i].size(); ++dim) {
        if (tensors[i][dim].empty()) {
          tensors[i][dim] = {rules::add_unsharded(rule_, sizes[i][dim])};
        }
      }
    }
  }

  // Called at the first call of the operator, because at registration the sizes are unknown.
  void check(bool condition, const char* what) const {
    TESSERA_CHECK(condition, "an entry of the rule registered for ", call_.op, " ", what,
                  "; write a rule of factors for that");
  }

  const OpCall& call_;
  ShardingRule rule_;
  SizesOfEach input_sizes_, output_sizes_;
  int factor_ = -1;
};

}  // namespace

void register_rule(std::string op, std::vector<AcceptedPlacements> accepted, ResultSizes results) {
  // Default: one result like the first tensor, as for pointwise operators, the most frequent case.
  if (!results) {
    results = [](const OpCall& call) { return SizesOfEach{call.tensors.at(0).sizes}; };
  }
  register_rule(std::move(op),
                [accepted = std::move(accepted),
                 results = std::move(results)](const OpCall& call) -> std::optional<ShardingRule> {
                  AcceptedRule rule(call, results(call));
                  for (const auto& row : accepted) {
                    rule.add(row);
                  }
                  return std::move(rule).finish();
                });
}

// propagate(): computes the layouts with which a call runs, from a rule, which describes one mesh
// dimension, and the inputs' layouts on a whole mesh. TensorGroupChooser decides what each mesh
// dimension does. This file turns the decisions into layouts and revokes impossible ones. Called
// once for each new call, by dtensor's plan/plan_by_rule.cpp.

namespace {

using TensorGroup = ShardingRule::TensorGroup;

std::vector<int> all_indices(std::size_t count) {
  return ranges::views::iota(0, static_cast<int>(count)) | ranges::to<std::vector>();
}

/// The mesh sizes of all inputs. Layouts contain only sizes of meshes; the caller has checked that
/// the meshes are the same.
std::vector<std::int64_t> common_mesh(const OpCall& call, std::span<const LayoutPtr> inputs) {
  LayoutPtr first = nullptr;
  for (const LayoutPtr& layout : inputs) {
    if (!layout) {
      continue;
    }
    if (!first) {
      first = layout;
    }
    TESSERA_CHECK(layout->mesh_sizes() == first->mesh_sizes(), call.op,
                  ": arguments are on meshes of different shapes: ", to_string(*first), " and ",
                  to_string(*layout), "; redistribute them to one mesh");
  }
  TESSERA_CHECK(first, call.op, ": propagate() needs a distributed argument, found none");
  return first->mesh_sizes();
}

/// Decides one group of tensors and writes its part of the result.
class TensorGroupPropagation {
 public:
  TensorGroupPropagation(const ShardingRule& rule, const OpCall& call,
                         std::span<const LayoutPtr> inputs,
                         const std::vector<std::int64_t>& mesh_sizes, const TensorGroup& group)
      : rule_(rule),
        inputs_(inputs),
        mesh_sizes_(mesh_sizes),
        group_(group),
        chooser_(rule, call, inputs, mesh_sizes, group) {}

  void write(Propagation& result) {
    decide();
    for (int input : group_.inputs) {
      result.inputs[static_cast<std::size_t>(input)] = input_layout(input);
    }
    for (int output : group_.outputs) {
      const auto& factors = rule_.outputs[static_cast<std::size_t>(output)];
      result.outputs[static_cast<std::size_t>(output)] = Layout::intern(
          mesh_sizes_, dims(factors),
          partial([&](const Choice& choice) { return chooser_.output_placement(output, choice); }));
    }
    if (wants_local_call()) {
      result.use_local_call = true;
    }
  }

 private:
  /// Makes choices for all mesh dimensions. Whether a factor may be divided in this way (unevenly,
  /// with an empty shard, in several ranges) is known only when all choices are made. If it may
  /// not, the factor is kept unsharded and the choices are made again, at most once for each
  /// factor.
  void decide() {
    std::set<int> unsharded;
    for (bool done = false; !done;) {
      choices_ = chooser_.choose(unsharded);
      digits_.clear();
      done = true;
      for (const Choice& choice : choices_) {
        // Several mesh dimensions may shard one factor; its digits include all of them.
        if (choice.kind != Choice::kFactor || digits_.count(choice.index)) {
          continue;
        }
        const auto& digits = digits_[choice.index] = factor_digits(choice.index);
        const auto& factor = rule_.factors[static_cast<std::size_t>(choice.index)];
        const bool fits = (!factor.contiguous || digits.size() == 1) &&
                          (factor.allow_uneven || splits_evenly(digits, mesh_sizes_)) &&
                          (factor.allow_empty || !splits_to_nothing(digits, mesh_sizes_));
        if (fits) {
          continue;
        }
        unsharded.insert(choice.index);
        done = false;
      }
    }
  }

  bool wants_local_call() const {
    if (!rule_.local_call) {
      return false;
    }
    const auto& factors = rule_.local_call->when_split;
    return factors.empty() || std::any_of(factors.begin(), factors.end(),
                                          [&](int factor) { return digits_.count(factor) > 0; });
  }

  bool shards(std::size_t mesh_dim, int factor) const {
    return choices_[mesh_dim] == Choice{Choice::kFactor, factor};
  }

  /// The digits of a factor over the mesh dimensions that were chosen for it: in the order of the
  /// input that carried_digits() picks, followed by the mesh dimensions that this input lacks.
  std::vector<Digit> factor_digits(int factor) const {
    std::vector<Digit> digits = chooser_.carried_digits(factor, choices_);
    std::set<int> present;
    for (Digit& digit : digits) {
      // Mesh dimensions that were not chosen for this factor are gathered.
      std::erase_if(digit.mesh_dims,
                    [&](int m) { return !shards(static_cast<std::size_t>(m), factor); });
      present.insert(digit.mesh_dims.begin(), digit.mesh_dims.end());
    }
    // If no input shards the factor over a chosen mesh dimension, there is one digit with all of
    // the factor's positions.
    if (digits.empty()) {
      digits.push_back({rule_.factors[static_cast<std::size_t>(factor)].size, {}});
    }
    for (std::size_t m = 0; m < choices_.size(); ++m) {
      if (shards(m, factor) && !present.count(static_cast<int>(m))) {
        // The mesh dimension is appended at the inner end of the first digit, so that existing mesh
        // dimensions keep their cuts.
        digits.front().mesh_dims.push_back(static_cast<int>(m));
      }
    }
    return digits;
  }

  std::vector<Digit> dim_digits(const ShardingRule::Factors& factors) const {
    std::vector<Digit> result;
    bool sharded = false;
    for (int factor : factors) {
      const auto found = digits_.find(factor);
      if (found == digits_.end()) {
        result.push_back({rule_.factors[static_cast<std::size_t>(factor)].size, {}});
      } else {
        result.insert(result.end(), found->second.begin(), found->second.end());
        sharded = true;
      }
    }
    // A dimension that is not sharded has no digits in canonical form.
    if (!sharded) {
      return {};
    }
    // Without positions, one digit over all mesh dimensions is enough.
    if (rules::size_of(rule_, factors) == 0) {
      for (Digit& digit : std::span(result).subspan(1)) {
        auto& major = result.front().mesh_dims;
        major.insert(major.end(), digit.mesh_dims.begin(), digit.mesh_dims.end());
      }
      result.resize(1);
    }
    // The only digit of a dimension has extent 0 (see Digit).
    if (result.size() == 1) {
      result.front().extent = 0;
    }
    return result;
  }

  Layout::Dims dims(const ShardingRule::TensorFactors& factors) const {
    Layout::Dims result;
    for (const auto& dim : factors) {
      result.push_back(dim_digits(dim));
    }
    return result;
  }

  template <class PlacementOf>
  std::vector<PartialDim> partial(PlacementOf placement_of) const {
    std::vector<PartialDim> result;
    for (std::size_t m = 0; m < choices_.size(); ++m) {
      const FactorPlacement placement = placement_of(choices_[m]);
      if (placement.kind == FactorPlacement::kPartial) {
        result.push_back({static_cast<int>(m), placement.op});
      }
    }
    return result;
  }

  /// The layout to which an input must be redistributed. An unread input keeps its own layout if
  /// possible.
  LayoutPtr input_layout(int input) const {
    const auto index = static_cast<std::size_t>(input);
    LayoutPtr own = inputs_[index];
    // An unread input's values do not matter, so a partial one need not be reduced; only its local
    // sizes may have to fit.
    const bool unread = chooser_.is_unread(input);
    const auto& factors = rule_.inputs[index];
    if (unread && own && (chooser_.is_hint(input) || !has_factors(factors))) {
      return own;
    }
    LayoutPtr wanted = Layout::intern(
        mesh_sizes_, dims(factors),
        partial([&](const Choice& choice) { return chooser_.wanted_placement(input, choice); }));
    if (unread && own && own->dims() == wanted->dims()) {
      return own;
    }
    // A plain tensor is the same on every rank, so if it is to be replicated it can stay plain.
    return !own && wanted->is_replicated() ? nullptr : wanted;
  }

  static bool has_factors(const ShardingRule::TensorFactors& factors) {
    return std::any_of(factors.begin(), factors.end(),
                       [](const auto& dim) { return !dim.empty(); });
  }

  const ShardingRule& rule_;
  std::span<const LayoutPtr> inputs_;
  const std::vector<std::int64_t>& mesh_sizes_;
  const TensorGroup& group_;
  TensorGroupChooser chooser_;
  std::vector<Choice> choices_;
  std::map<int, std::vector<Digit>> digits_;  // the digits of each sharded factor
};

}  // namespace

Propagation propagate(const ShardingRule& rule, const OpCall& call,
                      std::span<const LayoutPtr> inputs) {
  TESSERA_CHECK(inputs.size() == rule.inputs.size(), call.op, ": the rule is for ",
                rule.inputs.size(), " tensors, found ", inputs.size(), " layouts");
  const std::vector<std::int64_t> mesh_sizes = common_mesh(call, inputs);
  Propagation result;
  for (const LayoutPtr& layout : inputs) {  // replicated, unless a group decides otherwise
    result.inputs.push_back(layout ? Layout::replicated(mesh_sizes, layout->tensor_ndim())
                                   : nullptr);
  }
  for (const auto& factors : rule.outputs) {
    auto& sizes = result.output_sizes.emplace_back();
    for (const auto& dim : factors) {
      sizes.push_back(rules::size_of(rule, dim));
    }
  }
  result.outputs.resize(rule.outputs.size());
  // Most rules have one group, in which all tensors are decided together.
  const TensorGroup all{all_indices(rule.inputs.size()), all_indices(rule.outputs.size())};
  const std::span<const TensorGroup> groups =
      rule.groups.empty() ? std::span(&all, 1) : std::span(rule.groups);
  for (const TensorGroup& group : groups) {
    TensorGroupPropagation(rule, call, inputs, mesh_sizes, group).write(result);
  }
  return result;
}

}  // namespace tessera
