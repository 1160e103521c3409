#include <range/v3/range/conversion.hpp>
#include <range/v3/view/iota.hpp>
#include <range/v3/view/reverse.hpp>
#include <range/v3/view/zip.hpp>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "layout/digits.h"
#include "rules/rule_table.h"
#include "tessera/core/detail/rule_functions.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

using detail::ceil_div;
using detail::mesh_size;

// Sharding rules split a tensor dimension into factors (einsum index letters), layouts into Digits
// (sub-dimensions). A dimension can remain sharded only if the boundaries of factors and Digits
// agree.

/// Splits the sub-dimension `digit`: returns the outer part, with `extent` positions, and leaves
/// the inner part in `digit`. Returns nullopt if the mesh dimensions of `digit` cannot be divided
/// between both parts.
std::optional<Digit> cut(Digit& digit, std::int64_t extent,
                         std::span<const std::int64_t> mesh_sizes) {
  if (digit.extent % extent != 0) {
    return std::nullopt;
  }
  Digit major{extent, {}};
  Digit minor{digit.extent / extent, {}};
  std::int64_t left = extent;
  // Whether a mesh dimension has divided the Digit (sub-dimension) unevenly. Later mesh dimensions
  // would then divide chunks of different sizes, which a Digit cannot express.
  bool uneven = false;
  for (int mesh_dim : digit.mesh_dims) {
    const std::int64_t parts = mesh_size(mesh_sizes, mesh_dim);
    if (uneven) {
      return std::nullopt;
    }
    // When a rank has one position of the major Digit (sub-dimension), the remaining mesh
    // dimensions divide the minor Digit.
    if (left == 1) {
      minor.mesh_dims.push_back(mesh_dim);
      continue;
    }
    // Chunk sizes of the unsplit Digit (sub-dimension) must be multiples of `minor.extent`.
    if (ceil_div(left * minor.extent, parts) != ceil_div(left, parts) * minor.extent) {
      return std::nullopt;
    }
    uneven = left % parts != 0;
    left = ceil_div(left, parts);
    major.mesh_dims.push_back(mesh_dim);
  }
  digit = std::move(minor);
  return major;
}

/// Whether a rank gets no position if `mesh_dims` divide `extent` positions. Full and last chunks
/// are checked: 3 ranks divide 3 positions as 1, 1, 1, but 4 positions as 2, 2, 0.
bool leaves_nothing(std::int64_t extent, std::span<const int> mesh_dims,
                    std::span<const std::int64_t> mesh_sizes) {
  if (mesh_dims.empty() || extent == 0) {
    return extent == 0;
  }
  const std::int64_t parts = mesh_size(mesh_sizes, mesh_dims.front());
  const std::int64_t chunk = ceil_div(extent, parts);
  const std::int64_t last = std::max<std::int64_t>(extent - chunk * (parts - 1), 0);
  const auto inner = mesh_dims.subspan(1);
  return leaves_nothing(last, inner, mesh_sizes) || leaves_nothing(chunk, inner, mesh_sizes);
}

/// The Digits (sub-dimensions) of each factor (einsum index letter), the outermost Digit first.
using FactorDigits = std::vector<std::vector<Digit>>;

/// Assigns the Digits (sub-dimensions) of a tensor dimension to its factors (einsum index letters).
/// Splits a Digit that contains a boundary between factors; returns nullopt if this is impossible.
/// No extent may be 0.
std::optional<FactorDigits> align_digits(std::vector<Digit> digits,
                                         std::span<const std::int64_t> factor_sizes,
                                         std::span<const std::int64_t> mesh_sizes) {
  // A dimension that is a single factor (einsum index letter) gives the factor all of its Digits
  // (sub-dimensions), even Digits that are divided unevenly.
  if (factor_sizes.size() == 1) {
    return FactorDigits{std::move(digits)};
  }
  FactorDigits result(factor_sizes.size());
  auto digit = digits.begin();
  for (auto&& [of_factor, size] : ranges::views::zip(result, factor_sizes)) {
    std::int64_t left = size;
    while (left > 1 && digit != digits.end()) {
      if (digit->extent > left) {
        std::optional<Digit> major = cut(*digit, left, mesh_sizes);
        if (!major) {
          return std::nullopt;
        }
        of_factor.push_back(*std::move(major));
        left = 1;
        continue;
      }
      if (digit->extent == 0 || left % digit->extent != 0) {
        return std::nullopt;
      }
      left /= digit->extent;
      of_factor.push_back(std::move(*digit++));
    }
  }
  return digit == digits.end() ? std::optional(std::move(result)) : std::nullopt;
}

/// Removes and returns the innermost mesh dimension of `digits`; -1 if there is no mesh dimension.
int drop_innermost(std::vector<Digit>& digits) {
  for (Digit& digit : digits | ranges::views::reverse) {
    if (digit.mesh_dims.empty()) {
      continue;
    }
    const int mesh_dim = digit.mesh_dims.back();
    digit.mesh_dims.pop_back();
    return mesh_dim;
  }
  return -1;
}

/// Whether all shards of `digits` have equal sizes. For example, 12 positions can be divided evenly
/// over 2 and then over 3 ranks; 10 positions cannot.
bool splits_evenly(std::span<const Digit> digits, std::span<const std::int64_t> mesh_sizes) {
  for (const Digit& digit : digits) {
    std::int64_t left = digit.extent;
    for (int mesh_dim : digit.mesh_dims) {
      const std::int64_t parts = mesh_size(mesh_sizes, mesh_dim);
      if (left % parts != 0) {
        return false;
      }
      left /= parts;
    }
  }
  return true;
}

bool splits_to_nothing(std::span<const Digit> digits, std::span<const std::int64_t> mesh_sizes) {
  return std::any_of(digits.begin(), digits.end(), [&](const Digit& digit) {
    return leaves_nothing(digit.extent, digit.mesh_dims, mesh_sizes);
  });
}

// The choice of a placement for each mesh dimension, the outermost first. The candidates are
// replication and the placements of the inputs: other placements could save computation, but no
// communication. Costs are in bytes.

struct FactorPlacement {
  /// How a mesh dimension divides a tensor. kFactor: the factor (einsum index letter) `factor` is
  /// sharded. kOtherShard: the tensor is sharded, but not at the boundaries of factors.
  enum Kind { kReplicate, kFactor, kPartial, kOtherShard };
  Kind kind = kReplicate;
  int factor = -1;
  ReduceOp op = ReduceOp::kSum;
  friend bool operator==(const FactorPlacement&, const FactorPlacement&) = default;
};

/// The placement of tensors over one mesh dimension: all are replicated, one factor (einsum index
/// letter) is sharded, or the inputs of a ShardingRule::Linear remain partial.
struct Choice {
  enum Kind { kReplicate, kFactor, kLinear };
  Kind kind = kReplicate;
  int index = -1;  ///< index in ShardingRule::factors (kFactor) or ShardingRule::linear (kLinear)
  friend bool operator==(const Choice&, const Choice&) = default;
};

bool contains(const std::vector<int>& list, int value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

bool has_factor(const ShardingRule::TensorFactors& tensor, int factor) {
  return std::any_of(tensor.begin(), tensor.end(),
                     [&](const auto& dim) { return contains(dim, factor); });
}

/// The number of bytes of the whole tensor. A dimension of size 0 counts as size 1; otherwise ranks
/// without elements would choose different collectives than other ranks.
std::int64_t bytes_of(const TensorMeta& tensor) {
  std::int64_t bytes = tensor.itemsize;
  for (const std::int64_t size : tensor.sizes) {
    bytes *= std::max<std::int64_t>(size, 1);
  }
  return bytes;
}

bool is_sharded(const FactorPlacement& placement) {
  return placement.kind == FactorPlacement::kFactor ||
         placement.kind == FactorPlacement::kOtherShard;
}

std::vector<int> all_indices(std::size_t count) {
  return ranges::views::iota(0, static_cast<int>(count)) | ranges::to<std::vector>();
}

/// Returns the mesh sizes that the layouts of all inputs have. Throws Error if the sizes differ, or
/// if no input is distributed.
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
                  to_string(*layout), "; redistribute the arguments to one mesh");
  }
  TESSERA_CHECK(first, call.op, ": propagate() needs a distributed argument");
  return first->mesh_sizes();
}

/// Chooses the layouts of one TensorGroup (tensors whose layouts are chosen together). The
/// arguments of the constructor must outlive the object.
class TensorGroupPropagation {
 public:
  TensorGroupPropagation(const ShardingRule& rule, const OpCall& call,
                         std::span<const LayoutPtr> inputs,
                         const std::vector<std::int64_t>& mesh_sizes,
                         const ShardingRule::TensorGroup& group)
      : rule_(rule), call_(call), layouts_(inputs), mesh_sizes_(mesh_sizes), group_(group) {
    for (const auto& pair : rule.inplace) {
      if (contains(group.outputs, pair.output)) {
        inplace_.push_back(pair);
      }
    }
    for (std::size_t i = 0; i < rule.linear.size(); ++i) {
      const auto& partial = rule.linear[i].partial_inputs;
      if (!partial.empty() && contains(group.inputs, partial.front())) {
        linear_.push_back(static_cast<int>(i));
      }
    }
    for (int index : group.inputs) {
      const auto at = static_cast<std::size_t>(index);
      inputs_.push_back(read_input(index, inputs[at]));
    }
    // Inputs that are written in place come first, because their layouts cannot change. Large
    // inputs, which cost most to redistribute, follow. A stable sort gives all ranks the same
    // order.
    std::stable_sort(inputs_.begin(), inputs_.end(), [](const Input& a, const Input& b) {
      return std::pair(a.inplace, a.bytes) > std::pair(b.inplace, b.bytes);
    });
  }

  void write(Propagation& result) {
    decide();
    for (int input : group_.inputs) {
      result.inputs[static_cast<std::size_t>(input)] = input_layout(input);
    }
    for (int output : group_.outputs) {
      const auto& factors = rule_.outputs[static_cast<std::size_t>(output)];
      result.outputs[static_cast<std::size_t>(output)] = Layout::intern(
          mesh_sizes_, dims(factors),
          partial([&](const Choice& choice) { return output_placement(output, choice); }));
    }
    if (wants_local_call()) {
      result.use_local_call = true;
    }
  }

 private:
  struct Input {
    int index = 0;
    bool plain = false;
    bool inplace = false;
    std::int64_t bytes = 0;
    std::vector<FactorPlacement> placements = {};  // the input's placement on each mesh dimension
    // The sharded factors (einsum index letters) of the input, with their Digits (sub-dimensions).
    std::vector<std::pair<int, std::vector<Digit>>> digits = {};
  };

  /// Returns a Choice for each mesh dimension. No Choice shards a factor in `unsharded`.
  std::vector<Choice> choose(const std::set<int>& unsharded) const {
    std::vector<Choice> choices;
    for (std::size_t m = 0; m < mesh_sizes_.size(); ++m) {
      choices.push_back(choose_dim(m, choices, unsharded));
    }
    return choices;
  }

  /// Returns the placement that `choice` needs for an input. An added tensor (a bias) without the
  /// sharded factor (index letter) becomes Partial, so that the tensor is added only once.
  FactorPlacement wanted_placement(int input, const Choice& choice) const {
    if (choice.kind == Choice::kFactor) {
      const auto& factors = rule_.inputs[static_cast<std::size_t>(input)];
      if (has_factor(factors, choice.index)) {
        return {FactorPlacement::kFactor, choice.index};
      }
      const auto& reduction = rule_.factors[static_cast<std::size_t>(choice.index)].reduction;
      if (reduction && contains(rule_.additive, input)) {
        return {FactorPlacement::kPartial, -1, *reduction};
      }
    }
    if (choice.kind == Choice::kLinear) {
      const auto& linear = rule_.linear[static_cast<std::size_t>(choice.index)];
      if (contains(linear.partial_inputs, input)) {
        return {FactorPlacement::kPartial, -1, linear.op};
      }
    }
    return {};
  }

  /// Returns the placement of an output for `choice`. An output without the sharded factor (einsum
  /// index letter) becomes Partial, which may_shard() has permitted.
  FactorPlacement output_placement(int output, const Choice& choice) const {
    if (choice.kind == Choice::kLinear) {
      return {FactorPlacement::kPartial, -1,
              rule_.linear[static_cast<std::size_t>(choice.index)].op};
    }
    if (choice.kind == Choice::kReplicate) {
      return {};
    }
    if (has_factor(rule_.outputs[static_cast<std::size_t>(output)], choice.index)) {
      return {FactorPlacement::kFactor, choice.index};
    }
    const auto& reduction = rule_.factors[static_cast<std::size_t>(choice.index)].reduction;
    return reduction ? FactorPlacement{FactorPlacement::kPartial, -1, *reduction}
                     : FactorPlacement{};
  }

  bool is_unread(int input) const { return contains(rule_.unread, input); }

  /// Whether the operator uses neither values nor local sizes of an input (new_zeros). Such an
  /// input is not redistributed, and only suggests a layout for the outputs.
  bool is_hint(int input) const { return is_unread(input) && !rule_.size_arguments.empty(); }

  /// Returns the Digits (sub-dimensions) into which an input divides `factor` (index letter), or
  /// {}. Prefers an input written in place, then the best agreement with `choices`, then the
  /// largest input.
  std::vector<Digit> carried_digits(int factor, const std::vector<Choice>& choices) const {
    const Choice wanted{Choice::kFactor, factor};
    const std::vector<Digit>* best = nullptr;
    std::ptrdiff_t most = 0;
    bool inplace = false;
    for (const Input& input : inputs_) {
      for (const auto& [held, digits] : input.digits) {
        // An input that is written in place cannot be redistributed, so the Digits (sub-dimensions)
        // of this input are used, and other inputs are ignored.
        if (held != factor || inplace) {
          continue;
        }
        std::ptrdiff_t agreed = 0;
        for (std::size_t m = 0; m < choices.size(); ++m) {
          agreed += choices[m] == wanted &&
                    input.placements[m] == FactorPlacement{FactorPlacement::kFactor, factor};
        }
        if (agreed <= most) {
          continue;
        }
        most = agreed;
        best = &digits;
        inplace = input.inplace;
      }
    }
    return best ? *best : std::vector<Digit>{};
  }

  /// The cost of a Choice. A Choice without communication is best; then fewer bytes are better.
  struct Cost {
    bool moves = false;
    double bytes = 0;
    friend auto operator<=>(const Cost&, const Cost&) = default;
  };

  /// Expresses an input's layout as one placement of factors (einsum index letters) for each mesh
  /// dimension. A plain tensor counts as replicated, and adds nothing to candidates().
  Input read_input(int index, LayoutPtr layout) const {
    const auto& sizes = call_.tensors[static_cast<std::size_t>(index)].sizes;
    const auto& factors = rule_.inputs[static_cast<std::size_t>(index)];
    Input input{.index = index, .plain = !layout};
    input.inplace = std::any_of(inplace_.begin(), inplace_.end(),
                                [&](const auto& pair) { return pair.input == index; });
    input.bytes = bytes_of(call_.tensors[static_cast<std::size_t>(index)]);
    input.placements.resize(mesh_sizes_.size());
    if (!layout) {
      return input;
    }
    TESSERA_CHECK(static_cast<std::size_t>(layout->tensor_ndim()) == sizes.size() &&
                      factors.size() == sizes.size(),
                  call_.op, ": tensor ", index, " has ", sizes.size(),
                  " dimensions, but has layout ", to_string(*layout), " and a sharding rule for ",
                  factors.size(), " dimensions");
    for (const PartialDim& partial : layout->partial()) {
      input.placements[static_cast<std::size_t>(partial.mesh_dim)] = {FactorPlacement::kPartial, -1,
                                                                      partial.op};
    }
    for (const auto& [of_dim, digits, size] : ranges::views::zip(factors, layout->dims(), sizes)) {
      read_dim(input, of_dim, digits, size);
    }
    return input;
  }

  /// Records which factor (index letter) each mesh dimension shards. Marks innermost mesh
  /// dimensions as kOtherShard, to be gathered later, until the layout's Digits align with the
  /// factors.
  void read_dim(Input& input, const ShardingRule::Factors& factors, std::vector<Digit> digits,
                std::int64_t size) const {
    if (digits.empty()) {
      return;
    }
    // The extent 0 of a single Digit (sub-dimension) is replaced by the dimension's size.
    if (digits.size() == 1) {
      digits.front().extent = size;
    }
    std::vector<std::int64_t> sizes;
    for (int factor : factors) {
      sizes.push_back(rule_.factors[static_cast<std::size_t>(factor)].size);
    }
    for (;;) {
      if (auto aligned = align_digits(digits, sizes, mesh_sizes_); aligned && !factors.empty()) {
        for (auto&& [factor, of_factor] : ranges::views::zip(factors, *aligned)) {
          for (const Digit& digit : of_factor) {
            for (int m : digit.mesh_dims) {
              input.placements[static_cast<std::size_t>(m)] = {FactorPlacement::kFactor, factor};
            }
          }
          input.digits.emplace_back(factor, std::move(of_factor));
        }
        return;
      }
      const int dropped = drop_innermost(digits);
      if (dropped < 0) {
        return;
      }
      input.placements[static_cast<std::size_t>(dropped)] = {FactorPlacement::kOtherShard};
    }
  }

  /// Returns the cheapest candidate for a mesh dimension, or replication if every candidate is
  /// rejected, which can occur for a sharded in-place output (see LocalExecution::Inplace).
  Choice choose_dim(std::size_t mesh_dim, const std::vector<Choice>& before,
                    const std::set<int>& unsharded) const {
    std::optional<Choice> best;
    Cost lowest;
    for (const Choice& candidate : candidates(mesh_dim, unsharded)) {
      if (!keeps_inplace(mesh_dim, candidate) || mixes_reductions(candidate, before)) {
        continue;
      }
      const Cost found = cost(mesh_dim, candidate, before);
      if (!best || found < lowest) {
        best = candidate;
        lowest = found;
      }
    }
    return best.value_or(Choice{});
  }

  std::vector<Choice> candidates(std::size_t mesh_dim, const std::set<int>& unsharded) const {
    std::vector<Choice> result;
    const auto add = [&](Choice choice) {
      if (std::find(result.begin(), result.end(), choice) == result.end()) {
        result.push_back(choice);
      }
    };
    for (const Input& input : inputs_) {
      const FactorPlacement& placement = input.placements[mesh_dim];
      if (placement.kind == FactorPlacement::kReplicate && !input.plain) {
        add({});
      }
      if (placement.kind == FactorPlacement::kFactor && !unsharded.count(placement.factor) &&
          may_shard(placement.factor)) {
        add({Choice::kFactor, placement.factor});
      }
      if (placement.kind != FactorPlacement::kPartial) {
        continue;
      }
      for (int i : linear_) {
        const auto& linear = rule_.linear[static_cast<std::size_t>(i)];
        if (linear.op != placement.op) {
          continue;
        }
        if (input.inplace || contains(linear.partial_inputs, input.index)) {
          add({Choice::kLinear, i});
        }
      }
    }
    // Replication of all inputs is the last candidate, so that other candidates of equal cost win.
    add({});
    return result;
  }

  /// Whether a choice may shard a factor (einsum index letter). If an output lacks the factor, the
  /// rule must name a reduction that combines the outputs of the ranks.
  bool may_shard(int factor) const {
    const auto& properties = rule_.factors[static_cast<std::size_t>(factor)];
    if (properties.unsharded) {
      return false;
    }
    return properties.reduction ||
           std::all_of(group_.outputs.begin(), group_.outputs.end(), [&](int output) {
             return has_factor(rule_.outputs[static_cast<std::size_t>(output)], factor);
           });
  }

  /// Whether an output would be Partial with two reductions that do not commute. A Layout always
  /// reduces in a fixed order, which can be wrong for the operator.
  bool mixes_reductions(const Choice& choice, const std::vector<Choice>& before) const {
    return std::any_of(group_.outputs.begin(), group_.outputs.end(), [&](int output) {
      const FactorPlacement placement = output_placement(output, choice);
      if (placement.kind != FactorPlacement::kPartial) {
        return false;
      }
      return std::any_of(before.begin(), before.end(), [&](const Choice& other) {
        const FactorPlacement held = output_placement(output, other);
        return held.kind == FactorPlacement::kPartial && !commute(held.op, placement.op);
      });
    });
  }

  bool keeps_inplace(std::size_t mesh_dim, const Choice& choice) const {
    return std::all_of(inplace_.begin(), inplace_.end(), [&](const auto& pair) {
      const auto input = std::find_if(inputs_.begin(), inputs_.end(),
                                      [&](const Input& i) { return i.index == pair.input; });
      return input == inputs_.end() ||
             input->placements[mesh_dim] == output_placement(pair.output, choice);
    });
  }

  Cost cost(std::size_t mesh_dim, const Choice& choice, const std::vector<Choice>& before) const {
    double bytes = 0;
    for (const Input& input : inputs_) {
      bytes += moved_bytes(input, mesh_dim, choice);
    }
    // A Choice that moves no data costs nothing, even if its result is Partial: the reduction runs
    // only if an operator needs the reduced value.
    if (bytes == 0) {
      return {};
    }
    return {true, bytes + pending_bytes(mesh_dim, choice, before)};
  }

  /// Returns the number of bytes that a rank sends to give `input` the placement for `choice`.
  double moved_bytes(const Input& input, std::size_t mesh_dim, const Choice& choice) const {
    const FactorPlacement& have = input.placements[mesh_dim];
    const FactorPlacement want = wanted_placement(input.index, choice);
    if (have == want || have.kind == FactorPlacement::kReplicate || is_hint(input.index)) {
      return 0;
    }
    // If the values of a tensor are not read, a Partial sum need not be reduced.
    if (is_unread(input.index) && !is_sharded(have) && !is_sharded(want)) {
      return 0;
    }
    // The number of bytes of the local tensor, which other mesh dimensions have already divided.
    auto bytes = static_cast<double>(input.bytes);
    for (std::size_t m = 0; m < mesh_sizes_.size(); ++m) {
      if (m != mesh_dim && is_sharded(input.placements[m])) {
        bytes /= static_cast<double>(mesh_sizes_[m]);
      }
    }
    const auto parts = static_cast<double>(mesh_sizes_[mesh_dim]);
    // The bytes that a rank sends in an all-gather or a reduce-scatter of the tensor.
    const double gather = bytes * (parts - 1) / parts;
    if (is_sharded(have)) {
      return is_sharded(want) ? gather / parts : gather;
    }
    return is_sharded(want) ? gather : 2 * gather;
  }

  /// Returns the number of bytes that reducing the Partial outputs of `choice` would send.
  double pending_bytes(std::size_t mesh_dim, const Choice& choice,
                       const std::vector<Choice>& before) const {
    double total = 0;
    for (int output : group_.outputs) {
      if (output_placement(output, choice).kind != FactorPlacement::kPartial) {
        continue;
      }
      // 4 bytes for each element are assumed, because the rule does not know the result's type, and
      // comparing choices does not need the exact size.
      double bytes = inputs_.empty() ? 0.0 : 4.0;
      for (const auto& dim : rule_.outputs[static_cast<std::size_t>(output)]) {
        for (int factor : dim) {
          const std::int64_t size = rule_.factors[static_cast<std::size_t>(factor)].size;
          bytes *= static_cast<double>(std::max<std::int64_t>(size, 1));
        }
      }
      for (std::size_t m = 0; m < before.size(); ++m) {
        if (is_sharded(output_placement(output, before[m]))) {
          bytes /= static_cast<double>(mesh_sizes_[m]);
        }
      }
      const auto parts = static_cast<double>(mesh_sizes_[mesh_dim]);
      total += bytes * (parts - 1) / parts;
    }
    return total;
  }

  /// Chooses a placement for every mesh dimension. If the placements together divide a factor
  /// (einsum index letter) in a forbidden way, all choices are repeated without sharding this
  /// factor.
  void decide() {
    std::set<int> unsharded;
    for (bool done = false; !done;) {
      choices_ = choose(unsharded);
      digits_.clear();
      done = true;
      for (const Choice& choice : choices_) {
        // If several mesh dimensions shard one factor (einsum index letter), factor_digits()
        // includes all of them, so each factor is handled once.
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

  /// Returns the Digits (sub-dimensions) into which the chosen mesh dimensions divide a factor: the
  /// Digits from carried_digits(), then the other chosen mesh dimensions.
  std::vector<Digit> factor_digits(int factor) const {
    std::vector<Digit> digits = carried_digits(factor, choices_);
    std::set<int> present;
    for (Digit& digit : digits) {
      std::erase_if(digit.mesh_dims,
                    [&](int m) { return !shards(static_cast<std::size_t>(m), factor); });
      present.insert(digit.mesh_dims.begin(), digit.mesh_dims.end());
    }
    if (digits.empty()) {
      digits.push_back({rule_.factors[static_cast<std::size_t>(factor)].size, {}});
    }
    for (std::size_t m = 0; m < choices_.size(); ++m) {
      if (shards(m, factor) && !present.count(static_cast<int>(m))) {
        // The mesh dimension is appended at the inner end, so that the mesh dimensions before it
        // still divide at the same boundaries.
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
    // In canonical form a dimension that is not sharded has no Digits (sub-dimensions).
    if (!sharded) {
      return {};
    }
    // A dimension of size 0 gets a single Digit (sub-dimension) over all its mesh dimensions.
    if (rules::size_of(rule_, factors) == 0) {
      for (Digit& digit : std::span(result).subspan(1)) {
        auto& major = result.front().mesh_dims;
        major.insert(major.end(), digit.mesh_dims.begin(), digit.mesh_dims.end());
      }
      result.resize(1);
    }
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

  /// Returns the layout to which an input must be redistributed. An input whose values are not read
  /// keeps its layout if possible.
  LayoutPtr input_layout(int input) const {
    const auto index = static_cast<std::size_t>(input);
    LayoutPtr own = layouts_[index];
    // Values that are not read need not be reduced: the operator reads at most local sizes.
    const bool unread = is_unread(input);
    const auto& factors = rule_.inputs[index];
    const bool has_factors =
        std::ranges::any_of(factors, [](const auto& dim) { return !dim.empty(); });
    if (unread && own && (is_hint(input) || !has_factors)) {
      return own;
    }
    LayoutPtr wanted = Layout::intern(
        mesh_sizes_, dims(factors),
        partial([&](const Choice& choice) { return wanted_placement(input, choice); }));
    if (unread && own && own->dims() == wanted->dims()) {
      return own;
    }
    // A plain input counts as replicated, so a replicated layout needs no redistribution.
    return !own && wanted->is_replicated() ? nullptr : wanted;
  }

  const ShardingRule& rule_;
  const OpCall& call_;
  std::span<const LayoutPtr> layouts_;
  const std::vector<std::int64_t>& mesh_sizes_;
  const ShardingRule::TensorGroup& group_;
  // The inputs of this TensorGroup that are written in place, and the output of each such input.
  std::vector<ShardingRule::Inplace> inplace_;
  std::vector<int> linear_;      // indices of the TensorGroup's entries in ShardingRule::linear
  std::vector<Input> inputs_;    // the TensorGroup's inputs: in-place inputs first, then by size
  std::vector<Choice> choices_;  // the Choice for each mesh dimension, outermost first
  // The Digits (sub-dimensions) of each sharded factor (einsum index letter).
  std::map<int, std::vector<Digit>> digits_;
};

}  // namespace

Propagation propagate(const ShardingRule& rule, const OpCall& call,
                      std::span<const LayoutPtr> inputs) {
  TESSERA_CHECK(inputs.size() == rule.inputs.size(), call.op, ": the rule is for ",
                rule.inputs.size(), " tensors, but ", inputs.size(), " layouts were passed");
  const std::vector<std::int64_t> mesh_sizes = common_mesh(call, inputs);
  Propagation result;
  // Inputs are replicated unless a TensorGroup decides otherwise.
  for (const LayoutPtr& layout : inputs) {
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
  // Most rules have no explicit TensorGroup; the layouts of all tensors are then decided together.
  const ShardingRule::TensorGroup all{all_indices(rule.inputs.size()),
                                      all_indices(rule.outputs.size())};
  const std::span<const ShardingRule::TensorGroup> groups =
      rule.groups.empty() ? std::span(&all, 1) : std::span(rule.groups);
  for (const ShardingRule::TensorGroup& group : groups) {
    TensorGroupPropagation(rule, call, inputs, mesh_sizes, group).write(result);
  }
  return result;
}

}  // namespace tessera
