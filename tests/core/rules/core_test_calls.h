#pragma once

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/core/detail/rule_functions.h"

namespace tessera::testing {

/// A call whose first arguments are tensors of these sizes.
inline OpCall call(std::string_view op, std::vector<std::vector<std::int64_t>> tensors,
                   std::vector<Argument> args = {}) {
  OpCall result{.op = op, .args = {}, .tensors = {}};
  for (auto& sizes : tensors) {
    result.args.emplace_back(TensorRef{static_cast<int>(result.tensors.size())});
    result.tensors.push_back({std::move(sizes), 4});
  }
  result.args.insert(result.args.end(), args.begin(), args.end());
  return result;
}

inline Propagation decide(const OpCall& call, const std::vector<LayoutPtr>& layouts) {
  return propagate(find_rule(call.op)(call).value(), call, layouts);
}

}  // namespace tessera::testing
