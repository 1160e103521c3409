#include <ATen/TensorOperators.h>

#include <limits>

#include "rule_cases.h"

namespace tessera::testing {

std::vector<RuleCase> reduction_cases() {
  const double infinity = std::numeric_limits<double>::infinity();
  std::vector<RuleCase> cases;
  for (const char* op : {"sum", "mean", "prod", "max", "min", "any", "all", "median", "argmax",
                         "argmin", "nansum", "nanmedian", "count_nonzero", "norm.Scalar"}) {
    cases.push_back(row(op, reals({7, 5})));
    cases.push_back(row(op, reals({6, 4})));
    cases.push_back(row(op, reals({})));
  }
  for (const char* op : {"sum.dim_IntList", "mean.dim", "amax", "amin", "logsumexp", "any.dims",
                         "all.dims", "nansum"}) {
    for (bool keepdim : {false, true}) {
      cases.push_back(row(op, reals({7, 5, 3}), Ints{0}, keepdim));
      cases.push_back(row(op, reals({7, 5, 3}), Ints{-1}, keepdim));
      cases.push_back(row(op, reals({7, 5, 3}), Ints{1, -1}, keepdim));
    }
  }
  for (const char* op : {"prod.dim_int", "any.dim", "all.dim", "argmax", "argmin", "max.dim",
                         "min.dim", "median.dim", "mode"}) {
    cases.push_back(row(op, reals({7, 5, 3}), 0, false));
    cases.push_back(row(op, reals({7, 5, 3}), -1, true));
  }
  for (const char* op : {"_softmax", "_log_softmax"}) {
    cases.push_back(row(op, reals({7, 5, 3}), 1, false));
    cases.push_back(row(op, reals({7, 5, 3}), -1, false));
  }
  for (const char* op :
       {"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "cumsum_"}) {
    cases.push_back(row(op, reals({7, 5, 3}), 1));
    cases.push_back(row(op, reals({7, 5, 3}), -1));
    cases.push_back(row(op, reals({7, 5, 3}), 0));
  }
  for (double order : {0.0, 1.0, 2.0, 3.0, infinity, -infinity}) {
    cases.push_back(row("linalg_vector_norm", reals({7, 5}), order));
    cases.push_back(row("linalg_vector_norm", reals({7, 5}), order, Ints{-1}, true));
    if (order > 0) {
      cases.push_back(row("_foreach_norm.Scalar", tensor_list({reals({7, 5}), reals({6})}), order));
    }
  }
  std::vector<RuleCase> others{
      row("sum", reals({7, 5}), int64_t{6}),
      row("sum.dim_IntList", reals({7, 5}) * 4.0, Ints{0}, false, int64_t{4}),
      row("sum.dim_IntList", reals({7, 5}), Ints{}, false),
      row("mean.dim", reals({7, 5}).to(at::kBFloat16).to(at::kDouble), Ints{0}, false),
      row("std.correction", reals({7, 5}), Ints{1}, 1, true),
      row("var.correction", reals({7, 5}), Ints{0}, 0, false),
      row("var_mean.correction", reals({7, 5}), c10::IValue(), 1, false),
      row("histc", reals({7, 5}), 4, -1, 1),
      row("kthvalue", reals({7, 5}), 2, -1, true),
      row("aminmax", reals({7, 5}), 0, true),
      row("linalg__powsum", reals({7, 5}), 2.0, Ints{0}, false),
      row("_foreach_powsum.Scalar", tensor_list({reals({7, 5}), reals({6})}), 2),
      row("_foreach_max", tensor_list({reals({7, 5}), reals({6})})),
      row("_softmax_backward_data", reals({7, 5}), units({7, 5}), -1, int64_t{7}),
      row("_log_softmax_backward_data", reals({7, 5}), units({7, 5}), 0, int64_t{7}),
      row("topk", reals({7, 5}), 3, -2),
      row("sort.stable", reals({7, 5}), true, -1, true),
      row("flip", reals({7, 5}), Ints{-1}),
      row("roll", reals({7, 5}), Ints{2}, Ints{0}),
      row("roll", reals({7, 5}), Ints{2}),
      row("tril", reals({4, 7, 5})),
      row("triu", reals({7, 5}), 1),
      row("triu_", reals({7, 5}), 1),
      row("renorm", reals({7, 5}), 2, 1, 0.5),
      row("glu", reals({7, 6}), -1),
      row("glu_backward", reals({7, 3}), reals({7, 6}), -1),
      row("any", mask({7, 5})),
      row("any.dim", mask({7, 5}), 0, true),
      row("all.dim", mask({7, 5}), 1, false),
      row("sum", mask({7, 5})),
      row("sum.IntList_out", reals({7, 5}), Ints{0}, false, c10::IValue(), reals({5})),
      row("amax.out", reals({7, 5}), Ints{1}, false, reals({7})),
  };
  cases.insert(cases.end(), others.begin(), others.end());
  return cases;
}

}  // namespace tessera::testing
