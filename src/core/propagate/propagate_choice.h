// Choices of how to run a call: the digits of each factor of its rule.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "tessera/core/layout.h"
#include "tessera/core/sharding_rule.h"

namespace tessera {

/// Whether all chunks of `digits` have equal sizes.
bool splits_evenly(std::span<const Digit> digits, std::span<const std::int64_t> mesh_sizes);

/// Whether some coordinate has no position of `digits`.
bool splits_to_nothing(std::span<const Digit> digits, std::span<const std::int64_t> mesh_sizes);

// The greedy choice in propagate(): decides for one mesh dimension after another which factor it
// shards. Separate from propagate.cpp, which makes layouts of the choices.

/// The placement of one tensor on one mesh dimension, in terms of a rule's factors.
struct FactorPlacement {
  /// kFactor: `factor` is sharded. kOtherShard: sharded, but not along the boundaries of factors.
  enum Kind { kReplicate, kFactor, kPartial, kOtherShard };
  Kind kind = kReplicate;
  int factor = -1;
  ReduceOp op = ReduceOp::kSum;
  friend bool operator==(const FactorPlacement&, const FactorPlacement&) = default;
};

/// The effect of one mesh dimension on the tensors of a group: none, sharding of one factor, or
/// leaving the inputs of a ShardingRule::Linear partial.
struct Choice {
  enum Kind { kReplicate, kFactor, kLinear };
  Kind kind = kReplicate;
  int index = -1;  ///< index of the factor, or index in ShardingRule::linear
  friend bool operator==(const Choice&, const Choice&) = default;
};

/// Chooses, mesh dimension by mesh dimension, how to run one group of a rule's tensors
/// (propagate()). Refers to its arguments, which must outlive it.
class TensorGroupChooser {
 public:
  TensorGroupChooser(const ShardingRule& rule, const OpCall& call,
                     std::span<const LayoutPtr> inputs, std::span<const std::int64_t> mesh_sizes,
                     const ShardingRule::TensorGroup& group);

  /// One choice for each mesh dimension, outermost first. The factors in `unsharded` are not
  /// sharded.
  std::vector<Choice> choose(const std::set<int>& unsharded) const;

  /// The placement that `choice` needs for an input.
  FactorPlacement wanted_placement(int input, const Choice& choice) const;
  FactorPlacement output_placement(int output, const Choice& choice) const;
  bool is_unread(int input) const;
  /// Whether an input is unread and even its local sizes do not matter, because the sizes of the
  /// outputs are arguments (new_zeros). Its layout is then only a hint for the outputs' layouts.
  bool is_hint(int input) const;

  /// The digits of `factor` in the input that agrees with the choices on the most mesh dimensions.
  /// Ties go to an input that is written in place, then to a larger input. Empty if no input shards
  /// the factor. Extents are explicit (not 0).
  std::vector<Digit> carried_digits(int factor, const std::vector<Choice>& choices) const;

 private:
  struct Input {
    int index = 0;
    bool plain = false;  // whether the tensor is not distributed
    bool inplace = false;
    std::int64_t bytes = 0;                                       // size of the global tensor
    std::vector<FactorPlacement> placements = {};                 // for each mesh dimension
    std::vector<std::pair<int, std::vector<Digit>>> digits = {};  // by sharded factor
  };
  /// Ordered: first choices that move nothing, then by bytes.
  struct Cost {
    bool moves = false;
    double bytes = 0;
    friend auto operator<=>(const Cost&, const Cost&) = default;
  };

  Input read_input(int index, LayoutPtr layout) const;
  void read_dim(Input& input, const ShardingRule::Factors& factors, std::vector<Digit> digits,
                std::int64_t size) const;

  Choice choose_dim(std::size_t mesh_dim, const std::vector<Choice>& before,
                    const std::set<int>& unsharded) const;
  std::vector<Choice> candidates(std::size_t mesh_dim, const std::set<int>& unsharded) const;
  bool may_shard(int factor) const;
  bool mixes_reductions(const Choice& choice, const std::vector<Choice>& before) const;
  bool keeps_inplace(std::size_t mesh_dim, const Choice& choice) const;
  Cost cost(std::size_t mesh_dim, const Choice& choice, const std::vector<Choice>& before) const;
  double moved_bytes(const Input& input, std::size_t mesh_dim, const Choice& choice) const;
  double pending_bytes(std::size_t mesh_dim, const Choice& choice,
                       const std::vector<Choice>& before) const;

  const ShardingRule& rule_;
  const OpCall& call_;
  std::span<const std::int64_t> mesh_sizes_;
  const ShardingRule::TensorGroup& group_;
  std::vector<ShardingRule::Inplace> inplace_;  // the in-place pairs of this group
  std::vector<int> linear_;    // entries of ShardingRule::linear that concern this group
  std::vector<Input> inputs_;  // in-place ones first, then by size, largest first
};

}  // namespace tessera
