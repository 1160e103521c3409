#include <ATen/ops/sort.h>

#include <tuple>

#include "rule_cases.h"

namespace tessera::testing {

std::vector<RuleCase> indexing_cases() {
  const at::Tensor none;
  const auto some = mask({7, 5});
  return {
      row("index.Tensor", reals({7, 5}), index_list({indices({4}, 7)})),
      row("index.Tensor", reals({7, 5}), index_list({none, indices({2, 3}, 5)})),
      row("index.Tensor", reals({7, 5, 3}), index_list({indices({4}, 7), none, indices({4}, 3)})),
      row("index.Tensor", reals({7, 5, 3}),
          index_list({none, indices({4, 1}, 5), indices({6}, 3)})),
      row("index_put", reals({7, 5}), index_list({indices({4}, 7)}), reals({4, 5}), true),
      row("index_put", reals({7, 5}), index_list({indices({4}, 7)}), reals({5}), false),
      row("index_put", reals({7, 5}), index_list({none, indices({3}, 5)}), reals({7, 3}), true),
      row("index_put_", reals({7, 5}), index_list({indices({4}, 7)}), reals({4, 5}), true),
      row("index_put_", reals({7, 5}), index_list({indices({4}, 7)}), reals({}), false),
      row("_index_put_impl_", reals({7, 5}), index_list({indices({4}, 7)}), reals({4, 5}), true),
      row("index_put", reals({7, 5}), index_list({none, mask({5})}), reals({7, 1}), true),
      row("_index_put_impl_", reals({7, 5}), index_list({some}), reals({}), true),
      row("index_put", reals({7, 5, 4}), index_list({some}), reals({4}), false),
      row("index_select", reals({7, 5}), 0, indices({6}, 7)),
      row("index_select", reals({7, 5}), -1, indices({3}, 5)),
      row("index_add", reals({7, 5}), 0, indices({6}, 7), reals({6, 5})),
      row("index_add_", reals({7, 5}), -1, indices({6}, 5), reals({7, 6})),
      row("index_copy", reals({7, 5}), 0, indices({4}, 7), reals({4, 5})),
      row("index_fill.int_Scalar", reals({7, 5}), 1, indices({2}, 5), 3),
      row("gather", reals({7, 5}), 0, indices({4, 5}, 7)),
      row("gather", reals({7, 5}), -1, indices({7, 8}, 5)),
      row("gather", reals({7, 5}), 1, indices({3, 8}, 5)),
      row("gather", reals({7, 5}), 0, indices({1, 5}, 7)),
      row("gather", reals({7, 5}), 1, indices({6, 2}, 5)),
      row("scatter.src", reals({7, 5}), -1, indices({7, 1}, 5), reals({7, 1})),
      row("scatter.src", reals({7, 5}), 1, indices({4, 1}, 5), reals({7, 5})),
      row("scatter.value", reals({7, 5}), 0, indices({1, 5}, 7), 2.5),
      row("scatter_.value", reals({7, 5}), 0, indices({1, 5}, 7), 2.5),
      row("scatter_add", reals({7, 5}), 0, indices({6, 5}, 7), reals({6, 5})),
      row("scatter_add", reals({7, 5}), 1, indices({7, 9}, 5), reals({7, 9})),
      row("scatter_add_", reals({7, 5}), 1, indices({3, 9}, 5), reals({7, 9})),
      row("take", reals({7, 5}), indices({4, 3}, 35)),
      row("put", reals({7, 5}), indices({4, 3}, 35), reals({4, 3}), true),
      row("bucketize.Tensor", reals({7, 5}), std::get<0>(at::sort(reals({6}), 0, false))),
      row("searchsorted.Tensor", std::get<0>(at::sort(reals({7, 5}), -1, false)), reals({7, 4})),
      row("isin.Tensor_Tensor", indices({7, 5}, 9), indices({3}, 4)),
      row("select_backward", reals({5}), Ints{7, 5}, 0, 3),
      row("select_backward", reals({7}), Ints{7, 5}, -1, 3),
      row("slice_backward", reals({3, 5}), Ints{7, 5}, 0, 1, 4, 1),
      row("unfold_backward", reals({3, 5, 3}), Ints{7, 5}, 0, 3, 2),
      row("diagonal_backward", reals({4, 4}), Ints{4, 7, 5}, 1, 1, 2),
      row("scatter_reduce.two", reals({7, 5}), 1, indices({7, 9}, 5), reals({7, 9}),
          std::string("amax"), true),
      row("scatter_reduce.two", reals({7, 5}), 0, indices({9, 5}, 7), reals({9, 5}),
          std::string("mean"), false),
      row("select_scatter", reals({7, 5}), reals({7}), 1, 2),
      row("slice_scatter", reals({7, 5}), reals({3, 5}), 0, 1, 4),
      row("embedding", reals({7, 5}), indices({2, 3}, 7)),
      row("embedding", reals({7, 5}), indices({9}, 7), 2),
      row("embedding_dense_backward", reals({2, 3, 5}), indices({2, 3}, 7), 7, -1, false),
      row("embedding_dense_backward", reals({9, 5}), indices({9}, 7), 7, 2, false),
      row("embedding_dense_backward", reals({9, 5}), indices({9}, 7), 7, 2, true),
      row("_embedding_bag", reals({7, 5}), indices({6}, 7), indices({1}, 1), false, 0),
      row("_embedding_bag", reals({7, 5}), indices({6}, 7), indices({1}, 1), false, 1),
  };
}

}  // namespace tessera::testing
