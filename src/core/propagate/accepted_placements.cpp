// Turns a user's list of accepted placements into a rule of factors. An entry that shards
// dimensions is one factor, which those dimensions share; an entry with Partial inputs is a Linear.

#include <algorithm>
#include <string>
#include <utility>

#include "rules/rule_builder.h"
#include "tessera/core/error.h"
#include "tessera/core/register_rule.h"

namespace tessera {
namespace {

using SizesOfEach = std::vector<std::vector<std::int64_t>>;

/// Makes the rule of one call, entry by entry.
class AcceptedRule {
 public:
  // `results` are the sizes of the results, which a rule needs for its factors and a list of
  // placements does not say.
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

  // Each row becomes one factor or one Linear; rows are checked against the call, as the user wrote
  // them without one.
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

  /// Dimensions that no entry shards get factors that stay unsharded.
  ShardingRule finish() && {
    fill(rule_.inputs, input_sizes_);
    fill(rule_.outputs, output_sizes_);
    return std::move(rule_);
  }

 private:
  /// An entry with Shard inputs.
  void add_sharded(const AcceptedPlacements& row) {
    // Made by the first dimension that the entry names, when its size is known.
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
      // An output without Shard lacks the factor: a rule can only make it partial.
      const auto* partial = std::get_if<Partial>(&row.outputs[o]);
      check(partial != nullptr, "makes a replicated result of sharded inputs");
      auto& reduction = rule_.factors[static_cast<std::size_t>(factor_)].reduction;
      check(!reduction || *reduction == partial->op, "makes results with different reductions");
      reduction = partial->op;
    }
  }

  /// An entry without Shard: inputs that may be partial together, or all replicated.
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

  /// Gives a dimension the factor of the entry.
  /// A dimension has one factor here, so that two entries that shard it alike need a real rule.
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

  // Also for results, whose sizes propagate() reads off the factors.
  void fill(std::vector<ShardingRule::TensorFactors>& tensors, const SizesOfEach& sizes) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      for (std::size_t dim = 0; dim < tensors[i].size(); ++dim) {
        if (tensors[i][dim].empty()) {
          tensors[i][dim] = {rules::add_unsharded(rule_, sizes[i][dim])};
        }
      }
    }
  }

  // These errors come at the first call: the entries could not be checked when they were
  // registered, for lack of sizes.
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
  // One result like the first tensor: pointwise operators, the most frequent case.
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

}  // namespace tessera
