#include <ATen/ops/complex.h>

#include <limits>

#include "rule_cases.h"

namespace tessera::testing {

std::vector<RuleCase> view_cases() {
  std::vector<RuleCase> cases;
  for (const char* op : {"view", "_unsafe_view", "view_copy"}) {
    cases.push_back(row(op, reals({4, 6}), Ints{24}));
    cases.push_back(row(op, reals({7, 5}), Ints{-1}));
    cases.push_back(row(op, reals({24}), Ints{4, 6}));
    cases.push_back(row(op, reals({8, 6}), Ints{2, 4, -1}));
    cases.push_back(row(op, reals({8, 6}), Ints{8, 2, 3}));
    cases.push_back(row(op, reals({6, 4}), Ints{4, 6}));
    cases.push_back(row(op, reals({6, 1, 4}), Ints{6, 4, 1}));
    cases.push_back(row(op, reals({2, 3, 4, 5}), Ints{6, 20}));
    cases.push_back(row(op, reals({3, 2}), Ints{2, 3}));
    cases.push_back(row(op, reals({5, 2, 3, 7}), Ints{5, 3, 2, 7}));
    cases.push_back(row(op, reals({0, 4}), Ints{2, 0, 2}));
    cases.push_back(row(op, reals({1}), Ints{}));
    cases.push_back(row(op, reals({}), Ints{1, 1}));
    cases.push_back(row(op, reals({7, 5}), Ints{7, 5}));
  }
  std::vector<RuleCase> others{
      row("permute", reals({2, 3, 5}), Ints{2, 0, -2}),
      row("transpose.int", reals({7, 5}), -1, 0),
      row("t", reals({7, 5})),
      row("t", reals({7})),
      row("squeeze", reals({7, 1, 5, 1})),
      row("squeeze", reals({3, 4})),
      row("squeeze.dim", reals({7, 1, 5}), 1),
      row("squeeze.dim", reals({3, 1, 5}), 0),
      row("squeeze.dims", reals({3, 1, 5, 1}), Ints{0, -1}),
      row("unsqueeze", reals({7, 5}), -1),
      row("unsqueeze", reals({7, 5}), 0),
      row("expand", reals({7, 1}), Ints{2, -1, 5}),
      row("expand", reals({7, 5}), Ints{7, 5}),
      row("expand", reals({}), Ints{3}),
      row("repeat", reals({3, 5}), Ints{2, 1, 3}),
      row("unfold", reals({7, 5}), 0, 3, 2),
      row("diagonal", reals({4, 7, 5}), 1, 0, -1),
      row("view_as_real", at::complex(reals({7, 5}), units({7, 5}))),
      row("view.dtype", reals({7, 6}), int64_t{4}),
      row("view.dtype", reals({7, 6}), int64_t{6}),
      row("select.int", reals({7, 5}), 0, 3),
      row("select.int", reals({7, 5}), -1, -2),
      row("slice.Tensor", reals({7, 5}), 0, 1, 4),
      row("slice.Tensor", reals({7, 5}), 1, c10::IValue(), c10::IValue()),
      row("slice.Tensor", reals({7, 5}), 0, 0, -2),
      row("slice.Tensor", reals({7, 5}), 0, -9, 100, 2),
      row("slice.Tensor", reals({7, 5}), 0, 0, std::numeric_limits<std::int64_t>::max()),
      row("slice.Tensor", reals({7, 5}), 1, 4, 2),
      row("slice.Tensor", reals({6, 5}), 0, 2, 4),
      row("split.Tensor", reals({7, 5}), 3, 0),
      row("split.Tensor", reals({7, 5}), 2, -1),
      row("split.Tensor", reals({6, 5}), 3, 0),
      row("split_with_sizes", reals({7, 5}), Ints{3, 4}, 0),
      row("split_with_sizes", reals({7, 6}), Ints{2, 2, 2}, 1),
      row("unbind.int", reals({3, 5}), 0),
      row("unbind.int", reals({3, 5}), -1),
      row("cat", tensor_list({reals({7, 5}), reals({2, 5})}), 0),
      row("cat", tensor_list({reals({7, 5}), units({7, 5})}), -1),
      row("cat", tensor_list({reals({7, 5}), reals({0})}), 1),
      row("stack", tensor_list({reals({7, 5}), units({7, 5})}), 0),
      row("stack", tensor_list({reals({7, 5}), units({7, 5})}), -1),
  };
  cases.insert(cases.end(), others.begin(), others.end());
  return cases;
}

}  // namespace tessera::testing
