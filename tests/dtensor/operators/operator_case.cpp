#include "operator_case.h"

#include <random>

#include "testing/distributed.h"
#include "testing/random_layout.h"

namespace tessera::testing {
namespace {

using Case = OperatorCase;
using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<std::int64_t>;

/// Every placement of a tensor of `ndim` dimensions on a mesh of `mesh_ndim`.
std::vector<Placements> placements_for(std::int64_t ndim, std::size_t mesh_ndim) {
  std::vector<Placement> single{Replicate{}, Partial{}};
  for (std::int64_t d = 0; d < ndim; ++d) {
    single.push_back(Shard{d});
  }
  std::vector<Placements> all{{}};
  for (std::size_t m = 0; m < mesh_ndim; ++m) {
    std::vector<Placements> longer;
    for (const auto& start : all) {
      for (const auto& next : single) {
        longer.push_back(start);
        longer.back().push_back(next);
      }
    }
    all = std::move(longer);
  }
  // A dimension that both split, in FSDP's order.
  for (std::int64_t d = 0; d < ndim && mesh_ndim == 2; ++d) {
    all.push_back({StridedShard{d, 2}, Shard{d}});
  }
  return all;
}

/// A leaf's gradient lies as the leaf, replicated where that is partial.
void expect_lies_as_leaf(const at::Tensor& gradient, const at::Tensor& leaf) {
  const auto& of_leaf = *DistributedTensor(leaf).layout();
  const auto expected = Layout::intern(of_leaf.mesh_sizes(), of_leaf.dims());
  EXPECT_EQ(DistributedTensor(gradient).layout(), expected) << to_string(of_leaf);
}

Placements replicated(const DeviceMesh& mesh) {
  return Placements(static_cast<std::size_t>(mesh.ndim()), Replicate{});
}

/// The value and the gradients of sum(result * weights).
Tensors value_and_gradients(const Case& c, const Tensors& leaves) {
  for (const auto& leaf : leaves) {
    leaf.requires_grad_(c.differentiable);
  }
  const auto result = c.run(leaves);
  if (!c.differentiable) {
    return {full_tensor(result)};
  }
  result.mul(beside(result, values(result.sizes().vec(), 3))).sum().backward();
  Tensors outcome{full_tensor(result)};
  for (const auto& leaf : leaves) {
    if (tessera::is_distributed(leaf) && leaf.grad().defined()) {
      expect_lies_as_leaf(leaf.grad(), leaf);
    }
    outcome.push_back(leaf.grad().defined() ? full_tensor(leaf.grad()) : at::zeros({0}));
  }
  return outcome;
}

Tensors inputs_of(const Case& c) {
  Tensors inputs;
  for (const auto& sizes : c.inputs) {
    inputs.push_back(values(sizes, static_cast<double>(inputs.size())));
  }
  return inputs;
}

void expect_same(const Tensors& found, const Tensors& expected, const std::string& how) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(found[i].sizes(), expected[i].sizes()) << how << " " << i;
    ASSERT_TRUE(at::allclose(found[i], expected[i], 1e-9, 1e-12, true))
        << (i == 0 ? "value" : "gradient") << " with " << how << "\n"
        << found[i] << "\nexpected\n"
        << expected[i];
  }
}

/// All inputs lie at random: any order of mesh dimensions on a dimension, local digits in front,
/// partial, uneven.
void expect_equals_one_rank_at_random(const OperatorCase& c, const Sizes& mesh_sizes) {
  const auto expected = value_and_gradients(c, inputs_of(c));
  RunOnMesh(mesh_sizes, {}, [&](const DeviceMesh& mesh) {
    std::mt19937 engine(11);
    for (int i = 0; i < 20; ++i) {
      std::string how;
      Tensors inputs = inputs_of(c);
      for (auto& input : inputs) {
        const auto sizes = input.sizes().vec();
        const auto layout = random_layout(engine, mesh_sizes, sizes, {ReduceOp::kSum});
        how += " " + to_string(*layout);
        input =
            make_distributed(local_part(input, mesh, *layout), ShardingSpec{mesh, layout}, sizes);
      }
      expect_same(value_and_gradients(c, inputs), expected, how);
    }
  });
}

}  // namespace

at::Tensor beside(const at::Tensor& other, const at::Tensor& tensor) {
  if (!tessera::is_distributed(other)) {
    return tensor;
  }
  const auto& mesh = sharding_spec(other).mesh;
  return distribute_tensor(tensor, mesh, replicated(mesh));
}

void expect_equals_one_rank(const OperatorCase& c, const Sizes& mesh_sizes) {
  const auto expected = value_and_gradients(c, inputs_of(c));
  RunOnMesh(mesh_sizes, {}, [&](const DeviceMesh& mesh) {
    const auto ndim = static_cast<std::int64_t>(c.inputs[0].size());
    for (const auto& placements : placements_for(ndim, mesh_sizes.size())) {
      Tensors inputs = inputs_of(c);
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        inputs[i] = distribute_tensor(inputs[i], mesh, i == 0 ? placements : replicated(mesh))
                        .tensor()
                        .detach();
      }
      expect_same(value_and_gradients(c, inputs), expected, to_string(placements));
    }
  });
}

TEST_P(Operators, EqualOneRankOnALine) {
  expect_equals_one_rank(GetParam(), {4});
}

TEST_P(Operators, EqualOneRankOnAGrid) {
  expect_equals_one_rank(GetParam(), {2, 2});
}

TEST_P(Operators, EqualOneRankInRandomLayoutsOn2x2) {
  expect_equals_one_rank_at_random(GetParam(), {2, 2});
}

TEST_P(Operators, EqualOneRankInRandomLayoutsOn3x2) {
  expect_equals_one_rank_at_random(GetParam(), {3, 2});
}

}  // namespace tessera::testing
