// Views of another shape: which factors the two shapes share.
#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "rules/rule_builder.h"
#include "rules/rule_table.h"
#include "tessera/core/error.h"

namespace tessera::rules {
namespace {

/// Finds the factors that the two shapes of a reshape share. Walks both, major dimension first, and
/// gives the current dimensions a common factor: the greatest common divisor of what is left of
/// each. (2, 6) -> (4, 3) has factors 2, 2, 3; a dimension is split or several are joined. Where
/// the two have no common divisor, nothing can be shared up to the next boundary that both have:
/// those factors stay unsharded.
class Reshape {
 public:
  Reshape(ShardingRule& rule, const Sizes& from, const Sizes& to)
      : rule_(rule), input_(from.size()), output_(to.size()), from_(from), to_(to) {
    count(from) > 0 ? share(0) : share_without_elements();
  }
  TensorFactors input() { return std::move(input_); }
  TensorFactors output() { return std::move(output_); }

 private:
  static std::int64_t count(std::span<const std::int64_t> sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
  }

  /// Any shape of nothing is a view of any other. Sizes that both begin with are the same
  /// dimensions; what comes after them has elements to go by, or shares what both end with.
  void share_without_elements() {
    const auto rest = std::ranges::mismatch(from_, to_);
    const auto same = static_cast<std::size_t>(rest.in1 - from_.begin());
    for (std::size_t dim = 0; dim < same; ++dim) {
      input_[dim] = output_[dim] = {add_factor(rule_, from_[dim])};
    }
    const std::int64_t in = count({rest.in1, from_.end()}), out = count({rest.in2, to_.end()});
    if (in == out && in > 0) {
      return share(same);
    }
    std::size_t i = from_.size(), o = to_.size();
    for (; i > same && o > same && from_[i - 1] == to_[o - 1]; --i, --o) {
      input_[i - 1] = output_[o - 1] = {add_factor(rule_, from_[i - 1])};
    }
    for (std::size_t dim = same; dim < i; ++dim) {
      input_[dim] = {add_unsharded(rule_, from_[dim])};
    }
    for (std::size_t dim = same; dim < o; ++dim) {
      output_[dim] = {add_unsharded(rule_, to_[dim])};
    }
  }

  /// From dimension `first` on. `i` and `o` are one past the current dimensions.
  void share(std::size_t first) {
    std::size_t i = first, o = first;
    std::int64_t in = 1, out = 1;  // left of the current dimensions
    for (;;) {
      const bool more_input = next(from_, i, in), more_output = next(to_, o, out);
      if (!more_input || !more_output) {
        return;
      }
      const std::int64_t common = std::gcd(in, out);
      if (common == 1) {
        keep_unsharded_to_boundary(i, in, o, out);
        continue;
      }
      const int factor = add_factor(rule_, common);
      input_[i - 1].push_back(factor);
      output_[o - 1].push_back(factor);
      in /= common;
      out /= common;
    }
  }

  /// Goes on to the next dimension of a size other than 1 if the current one is used up. False at
  /// the end.
  static bool next(const Sizes& sizes, std::size_t& at, std::int64_t& left) {
    while (left == 1 && at < sizes.size()) {
      left = sizes[at++];
    }
    return left != 1;
  }

  // Consumes dimensions of the side that is behind until both have the same number of positions.
  void keep_unsharded_to_boundary(std::size_t& i, std::int64_t& in, std::size_t& o,
                                  std::int64_t& out) {
    std::int64_t in_product = in, out_product = out;
    input_[i - 1].push_back(add_unsharded(rule_, in));
    output_[o - 1].push_back(add_unsharded(rule_, out));
    while (in_product != out_product) {
      const bool behind = in_product < out_product;
      const Sizes& sizes = behind ? from_ : to_;
      std::size_t& at = behind ? i : o;
      const std::int64_t size = sizes[at++];
      (behind ? in_product : out_product) *= size;
      (behind ? input_ : output_)[at - 1].push_back(add_unsharded(rule_, size));
    }
    in = out = 1;
  }

  ShardingRule& rule_;
  TensorFactors input_, output_;
  const Sizes &from_, &to_;
};

/// The requested sizes, -1 filled in; nullopt if they don't hold as many elements as the tensor.
std::optional<Sizes> infer_sizes(Sizes sizes, std::int64_t numel) {
  std::int64_t known = 1;
  std::int64_t* inferred = nullptr;
  for (std::int64_t& size : sizes) {
    if (size >= 0) {
      known *= size;
    } else if (inferred) {
      return std::nullopt;
    } else {
      inferred = &size;
    }
  }
  if (inferred) {
    // With a size of 0 beside it, -1 has no answer; libtorch throws as well.
    if (known == 0 || numel % known != 0) {
      return std::nullopt;
    }
    *inferred = numel / known;
    known *= *inferred;
  }
  return known == numel ? std::optional(std::move(sizes)) : std::nullopt;
}

/// "[2, 6]".
std::string text_of(const Sizes& sizes) {
  std::string text;
  for (const std::int64_t size : sizes) {
    text += (text.empty() ? "" : ", ") + std::to_string(size);
  }
  return "[" + text + "]";
}

/// view(self, size) and similar ones.
std::optional<ShardingRule> reshape_rule(const OpCall& call) {
  const TensorMeta& self = call.tensor(0);
  const std::optional<Sizes> sizes = infer_sizes(call.integers(1), self.numel());
  TESSERA_CHECK(sizes, "view of a distributed tensor of sizes ", text_of(self.sizes), " as ",
                text_of(call.integers(1)),
                ", which has another number of elements; sizes are those of the whole tensor, not "
                "of this rank's part: write them as for one rank (heads, not heads / tp), or -1");
  ShardingRule rule = start(call);
  Reshape reshape(rule, self.sizes, *sizes);
  input_of(rule, call.tensor_index(0)) = reshape.input();
  rule.outputs.push_back(reshape.output());
  add_any_linear(rule, {call.tensor_index(0)});
  rule.size_arguments.push_back({1, 0});
  return rule;
}

/// _reshape_alias gets global strides; locally it is a view.
std::optional<ShardingRule> reshape_alias_rule(const OpCall& call) {
  std::optional<ShardingRule> rule = reshape_rule(call);
  if (rule) {
    rule->local_call = {"aten::view", {call.args[0], call.args[1]}};
  }
  return rule;
}

}  // namespace

std::vector<Row> reshape_rows() {
  return {
      {"view view_copy _unsafe_view reshape", reshape_rule},
      {"_reshape_alias", reshape_alias_rule},
  };
}

}  // namespace tessera::rules
