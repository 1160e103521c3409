#include "propagate_choice.h"

#include <algorithm>

#include "factor_digits.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

bool contains(const std::vector<int>& list, int value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

bool has_factor(const ShardingRule::TensorFactors& tensor, int factor) {
  return std::any_of(tensor.begin(), tensor.end(),
                     [&](const auto& dim) { return contains(dim, factor); });
}

bool is_split(const Hold& hold) {
  return hold.kind == Hold::kFactor || hold.kind == Hold::kOther;
}

}  // namespace

GroupChooser::GroupChooser(const ShardingRule& rule, const OpCall& call,
                           std::span<const LayoutPtr> inputs,
                           std::span<const std::int64_t> mesh_sizes,
                           const ShardingRule::Group& group)
    : rule_(rule), call_(call), mesh_sizes_(mesh_sizes), group_(group) {
  for (const auto& pair : rule.inplace) {
    if (contains(group.outputs, pair.output)) inplace_.push_back(pair);
  }
  for (std::size_t i = 0; i < rule.linear.size(); ++i) {
    const auto& partial = rule.linear[i].partial_inputs;
    if (!partial.empty() && contains(group.inputs, partial.front())) {
      linear_.push_back(static_cast<int>(i));
    }
  }
  for (int index : group.inputs) {
    const auto at = static_cast<std::size_t>(index);
    inputs_.push_back(read_input(index, inputs[at], call.tensors[at].itemsize));
  }
  std::stable_sort(inputs_.begin(), inputs_.end(), [](const Input& a, const Input& b) {
    return std::pair(a.inplace, a.bytes) > std::pair(b.inplace, b.bytes);
  });
}

GroupChooser::Input GroupChooser::read_input(int index, LayoutPtr layout,
                                             std::int64_t itemsize) const {
  const auto& sizes = call_.tensors[static_cast<std::size_t>(index)].sizes;
  const auto& factors = rule_.inputs[static_cast<std::size_t>(index)];
  Input input{.index = index, .plain = !layout};
  input.inplace = std::any_of(inplace_.begin(), inplace_.end(),
                              [&](const auto& pair) { return pair.input == index; });
  input.bytes = itemsize * call_.tensors[static_cast<std::size_t>(index)].numel();
  input.holds.resize(mesh_sizes_.size());
  if (!layout) return input;
  TESSERA_CHECK(static_cast<std::size_t>(layout->tensor_ndim()) == sizes.size() &&
                    factors.size() == sizes.size(),
                call_.op, ": tensor ", index, " has ", sizes.size(), " dimensions, its layout ",
                to_string(*layout), " and the rule's ", factors.size());
  for (const PartialDim& partial : layout->partial()) {
    input.holds[static_cast<std::size_t>(partial.mesh_dim)] = {Hold::kPartial, -1, partial.op};
  }
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    read_dim(input, factors[dim], layout->dims()[dim], sizes[dim]);
  }
  return input;
}

/// Notes which factor each mesh dimension splits. Where the digits don't line up with the factors,
/// mesh dimensions are given up, innermost first, until they do.
void GroupChooser::read_dim(Input& input, const ShardingRule::Factors& factors,
                            std::vector<Digit> digits, std::int64_t size) const {
  if (digits.empty()) return;
  if (digits.size() == 1) digits.front().extent = size;
  std::vector<std::int64_t> sizes;
  for (int factor : factors) {
    sizes.push_back(rule_.factors[static_cast<std::size_t>(factor)].size);
  }
  for (;;) {
    if (auto aligned = align_digits(digits, sizes, mesh_sizes_); aligned && !factors.empty()) {
      for (std::size_t i = 0; i < factors.size(); ++i) {
        for (const Digit& digit : (*aligned)[i]) {
          for (int m : digit.mesh_dims) {
            input.holds[static_cast<std::size_t>(m)] = {Hold::kFactor, factors[i]};
          }
        }
        input.digits.emplace_back(factors[i], std::move((*aligned)[i]));
      }
      return;
    }
    const int dropped = drop_innermost(digits);
    if (dropped < 0) return;
    input.holds[static_cast<std::size_t>(dropped)] = {Hold::kOther};
  }
}

std::vector<Choice> GroupChooser::choose(const std::set<int>& whole) const {
  std::vector<Choice> choices;
  for (std::size_t m = 0; m < mesh_sizes_.size(); ++m) {
    choices.push_back(choose_dim(m, choices, whole));
  }
  return choices;
}

Choice GroupChooser::choose_dim(std::size_t mesh_dim, const std::vector<Choice>& before,
                                const std::set<int>& whole) const {
  std::optional<Choice> best;
  Cost lowest;
  for (const Choice& candidate : candidates(mesh_dim, whole)) {
    if (!keeps_inplace(mesh_dim, candidate) || mixes_reductions(candidate, before)) continue;
    const Cost found = cost(mesh_dim, candidate, before);
    if (!best || found < lowest) {
      best = candidate;
      lowest = found;
    }
  }
  return best.value_or(Choice{});
}

/// What some input already is, in the order of inputs_, so that the first of equals is to be taken.
std::vector<Choice> GroupChooser::candidates(std::size_t mesh_dim,
                                             const std::set<int>& whole) const {
  std::vector<Choice> result;
  const auto add = [&](Choice choice) {
    if (std::find(result.begin(), result.end(), choice) == result.end()) result.push_back(choice);
  };
  for (const Input& input : inputs_) {
    const Hold& hold = input.holds[mesh_dim];
    if (hold.kind == Hold::kReplicate && !input.plain) add({});
    if (hold.kind == Hold::kFactor && !whole.count(hold.factor) && may_split(hold.factor)) {
      add({Choice::kFactor, hold.factor});
    }
    if (hold.kind != Hold::kPartial) continue;
    for (int i : linear_) {
      const auto& linear = rule_.linear[static_cast<std::size_t>(i)];
      if (linear.op != hold.op) continue;
      if (input.inplace || contains(linear.partial_inputs, input.index)) add({Choice::kLinear, i});
    }
  }
  add({});
  return result;
}

bool GroupChooser::may_split(int factor) const {
  const auto& properties = rule_.factors[static_cast<std::size_t>(factor)];
  if (properties.whole) return false;
  return properties.reduction ||
         std::all_of(group_.outputs.begin(), group_.outputs.end(), [&](int output) {
           return has_factor(rule_.outputs[static_cast<std::size_t>(output)], factor);
         });
}

bool GroupChooser::mixes_reductions(const Choice& choice, const std::vector<Choice>& before) const {
  return std::any_of(group_.outputs.begin(), group_.outputs.end(), [&](int output) {
    const Hold hold = output_hold(output, choice);
    if (hold.kind != Hold::kPartial) return false;
    return std::any_of(before.begin(), before.end(), [&](const Choice& other) {
      const Hold held = output_hold(output, other);
      return held.kind == Hold::kPartial && !commute(held.op, hold.op);
    });
  });
}

/// Whether in-place outputs come out as their input lies.
bool GroupChooser::keeps_inplace(std::size_t mesh_dim, const Choice& choice) const {
  return std::all_of(inplace_.begin(), inplace_.end(), [&](const auto& pair) {
    const auto input = std::find_if(inputs_.begin(), inputs_.end(),
                                    [&](const Input& i) { return i.index == pair.input; });
    return input == inputs_.end() || input->holds[mesh_dim] == output_hold(pair.output, choice);
  });
}

Hold GroupChooser::wanted_hold(int input, const Choice& choice) const {
  if (choice.kind == Choice::kFactor) {
    const auto& factors = rule_.inputs[static_cast<std::size_t>(input)];
    if (has_factor(factors, choice.index)) return {Hold::kFactor, choice.index};
    const auto& reduction = rule_.factors[static_cast<std::size_t>(choice.index)].reduction;
    if (reduction && contains(rule_.additive, input)) return {Hold::kPartial, -1, *reduction};
  }
  if (choice.kind == Choice::kLinear) {
    const auto& linear = rule_.linear[static_cast<std::size_t>(choice.index)];
    if (contains(linear.partial_inputs, input)) return {Hold::kPartial, -1, linear.op};
  }
  return {};
}

Hold GroupChooser::output_hold(int output, const Choice& choice) const {
  if (choice.kind == Choice::kLinear) {
    return {Hold::kPartial, -1, rule_.linear[static_cast<std::size_t>(choice.index)].op};
  }
  if (choice.kind == Choice::kReplicate) return {};
  if (has_factor(rule_.outputs[static_cast<std::size_t>(output)], choice.index)) {
    return {Hold::kFactor, choice.index};
  }
  const auto& reduction = rule_.factors[static_cast<std::size_t>(choice.index)].reduction;
  return reduction ? Hold{Hold::kPartial, -1, *reduction} : Hold{};
}

bool GroupChooser::is_unread(int input) const {
  return contains(rule_.unread, input);
}

bool GroupChooser::is_hint(int input) const {
  return is_unread(input) && !rule_.size_arguments.empty();
}

GroupChooser::Cost GroupChooser::cost(std::size_t mesh_dim, const Choice& choice,
                                      const std::vector<Choice>& before) const {
  double bytes = 0;
  for (const Input& input : inputs_) bytes += moved_bytes(input, mesh_dim, choice);
  if (bytes == 0) return {};
  return {true, bytes + pending_bytes(mesh_dim, choice, before)};
}

/// What bringing `input` to what `choice` wants of it sends, a rank.
double GroupChooser::moved_bytes(const Input& input, std::size_t mesh_dim,
                                 const Choice& choice) const {
  const Hold& have = input.holds[mesh_dim];
  const Hold want = wanted_hold(input.index, choice);
  if (have == want || have.kind == Hold::kReplicate) return 0;
  if (is_hint(input.index)) return 0;
  if (is_unread(input.index) && !is_split(have) && !is_split(want)) return 0;
  auto bytes = static_cast<double>(input.bytes);
  for (std::size_t m = 0; m < mesh_sizes_.size(); ++m) {
    if (m != mesh_dim && is_split(input.holds[m])) bytes /= static_cast<double>(mesh_sizes_[m]);
  }
  const auto parts = static_cast<double>(mesh_sizes_[mesh_dim]);
  const double gather = bytes * (parts - 1) / parts;
  if (is_split(have)) return is_split(want) ? gather / parts : gather;
  return is_split(want) ? gather : 2 * gather;
}

/// What reducing the outputs that `choice` makes partial will send, a rank.
double GroupChooser::pending_bytes(std::size_t mesh_dim, const Choice& choice,
                                   const std::vector<Choice>& before) const {
  double total = 0;
  for (int output : group_.outputs) {
    if (output_hold(output, choice).kind != Hold::kPartial) continue;
    double bytes = inputs_.empty() ? 0.0 : 4.0;
    for (const auto& dim : rule_.outputs[static_cast<std::size_t>(output)]) {
      for (int factor : dim) {
        bytes *= static_cast<double>(rule_.factors[static_cast<std::size_t>(factor)].size);
      }
    }
    for (std::size_t m = 0; m < before.size(); ++m) {
      if (is_split(output_hold(output, before[m]))) bytes /= static_cast<double>(mesh_sizes_[m]);
    }
    const auto parts = static_cast<double>(mesh_sizes_[mesh_dim]);
    total += bytes * (parts - 1) / parts;
  }
  return total;
}

std::vector<Digit> GroupChooser::carried_digits(int factor,
                                                const std::vector<Choice>& choices) const {
  const Choice wanted{Choice::kFactor, factor};
  const std::vector<Digit>* best = nullptr;
  std::ptrdiff_t most = 0;
  bool inplace = false;
  for (const Input& input : inputs_) {
    for (const auto& [held, digits] : input.digits) {
      if (held != factor || inplace) continue;
      std::ptrdiff_t agreed = 0;
      for (std::size_t m = 0; m < choices.size(); ++m) {
        agreed += choices[m] == wanted && input.holds[m] == Hold{Hold::kFactor, factor};
      }
      if (agreed <= most) continue;
      most = agreed;
      best = &digits;
      inplace = input.inplace;
    }
  }
  return best ? *best : std::vector<Digit>{};
}

}  // namespace tessera
