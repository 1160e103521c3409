#include "operator_case.h"

#include "testing/distributed.h"

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
  return all;
}

/// A leaf's gradient lies as the leaf, replicated where that is partial.
Placements of_gradient(Placements placements) {
  for (auto& placement : placements) {
    if (is_partial(placement)) {
      placement = Replicate{};
    }
  }
  return placements;
}

Placements replicated(const DeviceMesh& mesh) {
  return Placements(static_cast<std::size_t>(mesh.ndim()), Replicate{});
}

/// The value and the gradients of sum(result * weights).
Tensors value_and_gradients(const Case& c, Tensors inputs, const DeviceMesh* mesh,
                            const Placements& first) {
  Tensors arguments;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    auto leaf = inputs[i];
    if (mesh != nullptr) {
      const auto placements = i == 0 ? first : replicated(*mesh);
      leaf = distribute_tensor(leaf, *mesh, placements).tensor().detach();
    }
    arguments.push_back(leaf.requires_grad_(c.differentiable));
  }
  const auto result = c.run(arguments);
  if (!c.differentiable) {
    return {full_tensor(result)};
  }
  auto weights = values(result.sizes().vec(), 3);
  if (mesh != nullptr) {
    weights = distribute_tensor(weights, *mesh, replicated(*mesh));
  }
  result.mul(weights).sum().backward();
  Tensors outcome{full_tensor(result.detach())};
  for (const auto& argument : arguments) {
    if (mesh != nullptr && argument.grad().defined()) {
      EXPECT_EQ(to_string(DistributedTensor(argument.grad()).placements()),
                to_string(of_gradient(DistributedTensor(argument).placements())));
    }
    outcome.push_back(argument.grad().defined() ? full_tensor(argument.grad()) : at::zeros({0}));
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

}  // namespace

void expect_equals_one_rank(const OperatorCase& c, const std::vector<std::int64_t>& mesh_sizes) {
  const auto expected = value_and_gradients(c, inputs_of(c), nullptr, {});
  RunOnMesh(mesh_sizes, {}, [&](const DeviceMesh& mesh) {
    const auto ndim = static_cast<std::int64_t>(c.inputs[0].size());
    for (const auto& placements : placements_for(ndim, mesh_sizes.size())) {
      const auto found = value_and_gradients(c, inputs_of(c), &mesh, placements);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(found[i].sizes(), expected[i].sizes()) << to_string(placements) << " " << i;
        ASSERT_TRUE(at::allclose(found[i], expected[i], 1e-9, 1e-12, true))
            << (i == 0 ? "value" : "gradient") << " with " << to_string(placements) << "\n"
            << found[i] << "\nexpected\n"
            << expected[i];
      }
    }
  });
}

}  // namespace tessera::testing
