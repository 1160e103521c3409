#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "factor_digits.h"
#include "propagate_choice.h"
#include "tessera/core/error.h"
#include "tessera/core/sharding_rule.h"

namespace tessera {
namespace {

using Group = ShardingRule::Group;

std::vector<int> iota(std::size_t count) {
  std::vector<int> all(count);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::vector<std::int64_t> common_mesh(const OpCall& call, std::span<const LayoutPtr> inputs) {
  LayoutPtr first = nullptr;
  for (const LayoutPtr& layout : inputs) {
    if (!layout) continue;
    if (!first) first = layout;
    TESSERA_CHECK(layout->mesh_sizes() == first->mesh_sizes(), call.op,
                  ": arguments are on meshes of different shapes: ", to_string(*first), " and ",
                  to_string(*layout), "; redistribute them to one mesh");
  }
  TESSERA_CHECK(first, call.op, ": propagate() needs a distributed argument, found none");
  return first->mesh_sizes();
}

std::int64_t size_of(const ShardingRule& rule, const ShardingRule::Factors& factors) {
  std::int64_t size = 1;
  for (int factor : factors) size *= rule.factors[static_cast<std::size_t>(factor)].size;
  return size;
}

/// Decides one group of tensors and writes its part of the result.
class GroupPropagation {
 public:
  GroupPropagation(const ShardingRule& rule, const OpCall& call, std::span<const LayoutPtr> inputs,
                   const std::vector<std::int64_t>& mesh_sizes, const Group& group)
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
          partial([&](const Choice& choice) { return chooser_.output_hold(output, choice); }));
    }
    if (wants_local_call()) result.use_local_call = true;
  }

 private:
  /// Choices for all mesh dimensions; again, with the factor whole, where one is split unevenly, or
  /// to nothing, that must not be.
  void decide() {
    std::set<int> whole;
    for (bool settled = false; !settled;) {
      choices_ = chooser_.choose(whole);
      digits_.clear();
      settled = true;
      for (const Choice& choice : choices_) {
        if (choice.kind != Choice::kFactor || digits_.count(choice.index)) continue;
        const auto& digits = digits_[choice.index] = factor_digits(choice.index);
        const auto& factor = rule_.factors[static_cast<std::size_t>(choice.index)];
        const bool fits = (!factor.contiguous || digits.size() == 1) &&
                          (factor.uneven || splits_evenly(digits, mesh_sizes_)) &&
                          (factor.empty || !splits_to_nothing(digits, mesh_sizes_));
        if (fits) continue;
        whole.insert(choice.index);
        settled = false;
      }
    }
  }

  bool wants_local_call() const {
    if (!rule_.local_call) return false;
    const auto& factors = rule_.local_call->when_split;
    return factors.empty() || std::any_of(factors.begin(), factors.end(),
                                          [&](int factor) { return digits_.count(factor) > 0; });
  }

  bool splits(std::size_t mesh_dim, int factor) const {
    return choices_[mesh_dim] == Choice{Choice::kFactor, factor};
  }

  /// The digits of a factor on the mesh dimensions that were chosen for it: in the order of the
  /// input that has most of them so, an in-place one first; mesh dimensions that it lacks come
  /// last.
  std::vector<Digit> factor_digits(int factor) const {
    std::vector<Digit> digits = chooser_.carried_digits(factor, choices_);
    std::set<int> present;
    for (Digit& digit : digits) {
      std::erase_if(digit.mesh_dims,
                    [&](int m) { return !splits(static_cast<std::size_t>(m), factor); });
      present.insert(digit.mesh_dims.begin(), digit.mesh_dims.end());
    }
    if (digits.empty()) {
      digits.push_back({rule_.factors[static_cast<std::size_t>(factor)].size, {}});
    }
    for (std::size_t m = 0; m < choices_.size(); ++m) {
      if (splits(m, factor) && !present.count(static_cast<int>(m))) {
        digits.front().mesh_dims.push_back(static_cast<int>(m));
      }
    }
    return digits;
  }

  std::vector<Digit> dim_digits(const ShardingRule::Factors& factors) const {
    std::vector<Digit> result;
    bool split = false;
    for (int factor : factors) {
      const auto found = digits_.find(factor);
      if (found == digits_.end()) {
        result.push_back({rule_.factors[static_cast<std::size_t>(factor)].size, {}});
      } else {
        result.insert(result.end(), found->second.begin(), found->second.end());
        split = true;
      }
    }
    if (!split) return {};
    if (size_of(rule_, factors) == 0) {  // of no positions any split is as good
      for (Digit& digit : std::span(result).subspan(1)) {
        auto& major = result.front().mesh_dims;
        major.insert(major.end(), digit.mesh_dims.begin(), digit.mesh_dims.end());
      }
      result.resize(1);
    }
    if (result.size() == 1) result.front().extent = 0;
    return result;
  }

  Layout::Dims dims(const ShardingRule::TensorFactors& factors) const {
    Layout::Dims result;
    for (const auto& dim : factors) result.push_back(dim_digits(dim));
    return result;
  }

  template <class HoldOf>
  std::vector<PartialDim> partial(HoldOf hold_of) const {
    std::vector<PartialDim> result;
    for (std::size_t m = 0; m < choices_.size(); ++m) {
      const Hold hold = hold_of(choices_[m]);
      if (hold.kind == Hold::kPartial) result.push_back({static_cast<int>(m), hold.op});
    }
    return result;
  }

  LayoutPtr input_layout(int input) const {
    const auto index = static_cast<std::size_t>(input);
    LayoutPtr own = inputs_[index];
    const bool unread = chooser_.is_unread(input);
    const auto& factors = rule_.inputs[index];
    if (unread && own && (chooser_.is_hint(input) || !has_factors(factors))) return own;
    LayoutPtr wanted = Layout::intern(
        mesh_sizes_, dims(factors),
        partial([&](const Choice& choice) { return chooser_.wanted_hold(input, choice); }));
    if (unread && own && own->dims() == wanted->dims()) return own;
    return !own && wanted->is_replicated() ? nullptr : wanted;
  }

  static bool has_factors(const ShardingRule::TensorFactors& factors) {
    return std::any_of(factors.begin(), factors.end(),
                       [](const auto& dim) { return !dim.empty(); });
  }

  const ShardingRule& rule_;
  std::span<const LayoutPtr> inputs_;
  const std::vector<std::int64_t>& mesh_sizes_;
  const Group& group_;
  GroupChooser chooser_;
  std::vector<Choice> choices_;
  std::map<int, std::vector<Digit>> digits_;  // of the factors that are split
};

}  // namespace

Propagation propagate(const ShardingRule& rule, const OpCall& call,
                      std::span<const LayoutPtr> inputs) {
  TESSERA_CHECK(inputs.size() == rule.inputs.size(), call.op, ": the rule is for ",
                rule.inputs.size(), " tensors, found ", inputs.size(), " layouts");
  const std::vector<std::int64_t> mesh_sizes = common_mesh(call, inputs);
  Propagation result;
  for (const LayoutPtr& layout : inputs) {  // what no group decides: replicated
    result.inputs.push_back(layout ? Layout::replicated(mesh_sizes, layout->tensor_ndim())
                                   : nullptr);
  }
  for (const auto& factors : rule.outputs) {
    auto& sizes = result.output_sizes.emplace_back();
    for (const auto& dim : factors) sizes.push_back(size_of(rule, dim));
  }
  result.outputs.resize(rule.outputs.size());
  const Group all{iota(rule.inputs.size()), iota(rule.outputs.size())};
  const std::span<const Group> groups =
      rule.groups.empty() ? std::span(&all, 1) : std::span(rule.groups);
  for (const Group& group : groups) {
    GroupPropagation(rule, call, inputs, mesh_sizes, group).write(result);
  }
  return result;
}

}  // namespace tessera
