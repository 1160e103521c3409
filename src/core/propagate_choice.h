#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "tessera/core/sharding_rule.h"

namespace tessera {

/// How one tensor lies on one mesh dimension, in terms of a rule's factors.
struct Hold {
  enum Kind { kReplicate, kFactor, kPartial, kOther };  ///< kOther: split, but not along a factor
  Kind kind = kReplicate;
  int factor = -1;
  ReduceOp op = ReduceOp::kSum;
  friend bool operator==(const Hold&, const Hold&) = default;
};

/// What one mesh dimension does to the tensors of a group.
struct Choice {
  enum Kind { kReplicate, kFactor, kLinear };
  Kind kind = kReplicate;
  int index = -1;  ///< of the factor, or in ShardingRule::linear
  friend bool operator==(const Choice&, const Choice&) = default;
};

/// Chooses, mesh dimension by mesh dimension, how to run one group of a rule's tensors.
class GroupChooser {
 public:
  GroupChooser(const ShardingRule& rule, const OpCall& call, std::span<const LayoutPtr> inputs,
               std::span<const std::int64_t> mesh_sizes, const ShardingRule::Group& group);

  /// One choice per mesh dimension; the factors in `whole` are not split.
  std::vector<Choice> choose(const std::set<int>& whole) const;

  /// How `choice` wants an input, and what it makes of an output.
  Hold wanted_hold(int input, const Choice& choice) const;
  Hold output_hold(int output, const Choice& choice) const;
  bool is_unread(int input) const;
  /// Of an unread input, and where the outputs' local sizes are given, not even those count.
  bool is_hint(int input) const;

  /// The digits of `factor` in the input that agrees with the choices on most mesh dimensions, an
  /// in-place one first, then a larger one; empty if none splits it. Extents are explicit.
  std::vector<Digit> carried_digits(int factor, const std::vector<Choice>& choices) const;

 private:
  struct Input {
    int index = 0;
    bool plain = false;
    bool inplace = false;
    std::int64_t bytes = 0;                                       // of the global tensor
    std::vector<Hold> holds = {};                                 // per mesh dimension
    std::vector<std::pair<int, std::vector<Digit>>> digits = {};  // of each split factor
  };
  struct Cost {
    bool moves = false;
    double bytes = 0;
    friend auto operator<=>(const Cost&, const Cost&) = default;
  };

  Input read_input(int index, LayoutPtr layout, std::int64_t itemsize) const;
  void read_dim(Input& input, const ShardingRule::Factors& factors, std::vector<Digit> digits,
                std::int64_t size) const;

  Choice choose_dim(std::size_t mesh_dim, const std::vector<Choice>& before,
                    const std::set<int>& whole) const;
  std::vector<Choice> candidates(std::size_t mesh_dim, const std::set<int>& whole) const;
  bool may_split(int factor) const;
  bool mixes_reductions(const Choice& choice, const std::vector<Choice>& before) const;
  bool keeps_inplace(std::size_t mesh_dim, const Choice& choice) const;
  Cost cost(std::size_t mesh_dim, const Choice& choice, const std::vector<Choice>& before) const;
  double moved_bytes(const Input& input, std::size_t mesh_dim, const Choice& choice) const;
  double pending_bytes(std::size_t mesh_dim, const Choice& choice,
                       const std::vector<Choice>& before) const;

  const ShardingRule& rule_;
  const OpCall& call_;
  std::span<const std::int64_t> mesh_sizes_;
  const ShardingRule::Group& group_;
  std::vector<ShardingRule::Inplace> inplace_;  // of this group
  std::vector<int> linear_;                     // of this group, in ShardingRule::linear
  std::vector<Input> inputs_;                   // in-place ones first, then by size, largest first
};

}  // namespace tessera
