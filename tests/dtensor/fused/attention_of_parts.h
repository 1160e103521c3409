#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "testing/distributed.h"

namespace tessera::testing {

/// Expects of `attention` of queries, keys and values, placed on ("dp", "tp") so, by batch and
/// heads unless said otherwise, what it gives on one rank, with the gradients, and that nothing
/// moves.
inline void expect_attention_of_parts(
    const std::vector<at::Tensor>& plain,
    const std::function<at::Tensor(const std::vector<at::Tensor>&)>& attention,
    const Placements& placements = {Shard{0}, Shard{1}}) {
  std::vector<at::Tensor> whole;
  for (const at::Tensor& x : plain) {
    whole.push_back(x.detach().requires_grad_());
  }
  const at::Tensor expected = attention(whole);
  expected.square().sum().backward();
  RunOnMesh({2, 2}, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
    std::vector<at::Tensor> mine;
    for (const at::Tensor& x : plain) {
      mine.push_back(distribute_tensor(x, mesh, placements).tensor().requires_grad_());
    }
    const StrictScope nothing_moves;
    const at::Tensor result = attention(mine);
    EXPECT_EQ(DistributedTensor(result).placements(), placements);
    result.square().sum().backward();
    EXPECT_CLOSE(result, expected);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      EXPECT_CLOSE(mine[i].grad(), whole[i].grad()) << i;
    }
  });
}

}  // namespace tessera::testing
