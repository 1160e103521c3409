// The gradients of local_map's arguments that are replicated.

#include "tessera/dtensor/local_map.h"
#include "testing/distributed.h"
#include "testing/environment.h"

namespace tessera {
namespace {

using Tensors = std::vector<at::Tensor>;
using testing::values;

/// x, of 7 rows, times a replicated weight, on 4 ranks.
struct Product {
  explicit Product(Rank& rank)
      : mesh(rank.mesh({4}, {"x"})),
        x(distribute_tensor(values({7, 3}), mesh, {Shard{0}})),
        weight(distribute_tensor(values({3, 2}, 1), mesh, {Replicate{}}).tensor().detach()) {
    weight.requires_grad_();
  }
  DeviceMesh mesh;
  at::Tensor x, weight;
};

at::Tensor gradient_alone() {
  const at::Tensor weight = values({3, 2}, 1).requires_grad_();
  at::mm(values({7, 3}), weight).sum().backward();
  return weight.grad();
}

TEST(LocalMapGradients, ArePartialForReplicatedArgumentsWhereTheResultIsSplit) {
  RunRanks(4, [](Rank& rank) {
    const Product p(rank);
    local_map([](const Tensors& t) { return Tensors{at::mm(t[0], t[1])}; }, {p.x, p.weight}, p.mesh,
              {{Shard{0}}}, {.out_sizes = {{7, 2}}})[0]
        .sum()
        .backward();
    EXPECT_TRUE(at::allclose(DistributedTensor(p.weight.grad()).full_tensor(), gradient_alone()));
  });
}

TEST(LocalMapGradients, ArePartialForReplicatedArgumentsWhereTheResultIsASum) {
  RunRanks(4, [](Rank& rank) {
    const Product p(rank);
    local_map([](const Tensors& t) { return Tensors{at::mm(t[0], t[1]).sum()}; }, {p.x, p.weight},
              p.mesh, {{Partial{}}})[0]
        .backward();
    EXPECT_TRUE(at::allclose(DistributedTensor(p.weight.grad()).full_tensor(), gradient_alone()));
  });
}

TEST(LocalMapGradients, AreReplicatedForReplicatedArgumentsWhereTheResultIs) {
  RunRanks(4, [](Rank& rank) {
    const Product p(rank);
    const at::Tensor whole = distribute_tensor(values({7, 3}), p.mesh, {Replicate{}});
    local_map([](const Tensors& t) { return Tensors{at::mm(t[0], t[1])}; }, {whole, p.weight},
              p.mesh, {{Replicate{}}})[0]
        .sum()
        .backward();
    EXPECT_TRUE(at::allclose(DistributedTensor(p.weight.grad()).full_tensor(), gradient_alone()));
  });
}

TEST(LocalMapGradients, ArePlacedForEachMeshDimensionSeparately) {
  RunOnMesh({2, 2}, {"a", "b"}, [](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(values({7, 3}), mesh, {Replicate{}, Shard{0}});
    const at::Tensor weight =
        distribute_tensor(values({3, 2}, 1), mesh, {Replicate{}, Replicate{}}).tensor().detach();
    weight.requires_grad_();
    local_map([](const Tensors& t) { return Tensors{at::mm(t[0], t[1])}; }, {x, weight}, mesh,
              {{Replicate{}, Shard{0}}}, {.out_sizes = {{7, 2}}})[0]
        .sum()
        .backward();
    EXPECT_TRUE(at::allclose(DistributedTensor(weight.grad()).full_tensor(), gradient_alone()));
  });
}

TEST(LocalMapGradients, ArePlainAndWholeForPlainArguments) {
  RunRanks(4, [](Rank& rank) {
    const Product p(rank);
    const auto product = [&](const at::Tensor& weight, LocalMapOptions options) {
      options.out_sizes = {{7, 2}};
      return local_map([](const Tensors& t) { return Tensors{at::mm(t[0], t[1])}; }, {p.x, weight},
                       p.mesh, {{Shard{0}}}, options)[0];
    };
    const at::Tensor plain = DistributedTensor(p.weight).full_tensor().detach().requires_grad_();
    product(plain, {}).sum().backward();
    EXPECT_FALSE(tessera::is_distributed(plain.grad()));
    EXPECT_TRUE(at::allclose(plain.grad(), gradient_alone()));
    // A function may reduce one itself.
    plain.mutable_grad().reset();
    product(plain, {.in_grad_placements = {std::nullopt, Placements{Replicate{}}}})
        .sum()
        .backward();
    EXPECT_FALSE(at::allclose(plain.grad(), gradient_alone()));
    // A local tensor brings its gradient to the distributed one.
    product(DistributedTensor(p.weight).to_local(), {}).sum().backward();
    EXPECT_TRUE(at::allclose(DistributedTensor(p.weight.grad()).full_tensor(), gradient_alone()));
  });
}

TEST(LocalMapGradients, AreToBeSaidWhereResultsDisagree) {
  RunRanks(4, [](Rank& rank) {
    const Product p(rank);
    const auto both = [&](const LocalMapOptions& options) {
      return local_map([](const Tensors& t) { return Tensors{at::mm(t[0], t[1]), t[1].square()}; },
                       {p.x, p.weight}, p.mesh, {{Shard{0}}, {Replicate{}}}, options);
    };
    EXPECT_ERROR(both({.out_sizes = {{7, 2}, {3, 2}}}),
                 "the gradient of argument 1, which is replicated",
                 "results are placed as [Shard(0)], [Replicate()]", "in_grad_placements");
    EXPECT_EQ(both({.in_grad_placements = {std::nullopt, Placements{Partial{}}},
                    .out_sizes = {{7, 2}, {3, 2}}})
                  .size(),
              2);
    const c10::NoGradGuard none;
    EXPECT_EQ(both({.out_sizes = {{7, 2}, {3, 2}}}).size(), 2);
  });
}

// A function that adds up its terms itself: no placement says so.
TEST(LocalMapGradients, AreComparedInDebugMode) {
  const testing::DebugChecks checks("1");
  const auto errors = testing::ErrorsOfRanks(4, [](Rank& rank) {
    const Product p(rank);
    local_map(
        [&](const Tensors& t) {
          const at::Tensor term = at::mm(t[0], t[1]).sum();
          const at::Tensor others = term.detach().clone();
          p.mesh.group().all_reduce(others, ReduceOp::kSum)->wait();
          return Tensors{term + (others - term.detach())};
        },
        {p.x, p.weight}, p.mesh, {{Replicate{}}})[0]
        .backward();
  });
  EXPECT_CONTAINS(errors, "to_local: the local gradient of a tensor [3, 2]", "in_grad_placements");
}

TEST(FromLocal, ComparesWhatIsReplicatedInDebugMode) {
  const testing::DebugChecks checks("1");
  const auto errors = testing::ErrorsOfRanks(4, [](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2, 2}, {"a", "b"});
    DistributedTensor::from_local(values({3}, rank.rank() / 2), mesh, {Shard{0}, Replicate{}});
    DistributedTensor::from_local(values({3}, rank.rank()), mesh, {Shard{0}, Replicate{}});
  });
  EXPECT_CONTAINS(errors[0], "from_local: the local tensor differs from rank 0 on ranks 1");
  EXPECT_CONTAINS(errors[3], "from_local: the local tensor differs from rank 2 on ranks 3");
}

TEST(DistributeTensor, ComparesValuesInDebugMode) {
  const testing::DebugChecks checks("1");
  const auto errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    distribute_tensor(values({4}, rank.rank()), rank.mesh({2}, {"x"}), {Shard{0}});
  });
  EXPECT_CONTAINS(errors[0], "distribute_tensor: the tensor differs from rank 0 on ranks 1",
                  "first at [0]: 0 on rank 0", "source");
}

}  // namespace
}  // namespace tessera
