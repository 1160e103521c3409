// What helps to write and to look at distributed programs.

#include <algorithm>

#include "tessera/dtensor/communication_scope.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/local_map.h"
#include "testing/distributed.h"
#include "testing/environment.h"

namespace tessera {
namespace {

using testing::values;

TEST(LocalMap, RunsOnPartsForwardAndBackward) {
  auto plain = values({8, 3}).requires_grad_();
  plain.pow(2).sum().backward();
  RunOnMesh({4}, {"x"}, [&](const DeviceMesh& mesh) {
    const auto x = distribute_tensor(values({8, 3}), mesh, {Shard{0}}).tensor().detach();
    x.requires_grad_();
    const auto results =
        local_map([](const std::vector<at::Tensor>& t) { return std::vector{t[0].pow(2).sum()}; },
                  {x}, mesh, {{Partial{}}});
    results[0].backward();
    EXPECT_TRUE(at::allclose(DistributedTensor(x.grad()).full_tensor(), plain.grad()));
  });
}

// The rows of x are shared out, so that each rank has its own term of w's gradient.
TEST(LocalMap, AddsUpTheTermsOfAReplicatedArgumentsGradient) {
  auto w = values({3, 2}, 1).requires_grad_();
  at::mm(values({7, 3}), w).pow(2).sum().backward();
  RunOnMesh({4}, {"x"}, [&](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(values({7, 3}), mesh, {Shard{0}});
    const auto weight = distribute_tensor(values({3, 2}, 1), mesh, {Replicate{}}).tensor().detach();
    weight.requires_grad_();
    const auto results = local_map(
        [](const std::vector<at::Tensor>& t) { return std::vector{at::mm(t[0], t[1])}; },
        {x, weight}, mesh, {{Shard{0}}},
        {.in_grad_placements = {std::nullopt, Placements{Partial{}}}, .out_sizes = {{7, 2}}});
    results[0].pow(2).sum().backward();
    EXPECT_EQ(DistributedTensor(weight.grad()).placements(), Placements{Replicate{}});
    EXPECT_TRUE(at::allclose(DistributedTensor(weight.grad()).full_tensor(), w.grad()));
  });
}

TEST(LocalMap, RefusesOtherPlacementsUnlessAskedToMoveThem) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(values({4, 4}), mesh, {Shard{0}});
    const auto identity = [](const std::vector<at::Tensor>& t) { return t; };
    LocalMapOptions options{.in_placements = {Placements{Shard{1}}}};
    EXPECT_ERROR(local_map(identity, {x}, mesh, {{Shard{1}}}, options),
                 "argument 0 must have placements");
    options.redistribute_inputs = true;
    const auto moved = local_map(identity, {x}, mesh, {{Shard{1}}}, options);
    EXPECT_TRUE(at::equal(DistributedTensor(moved[0]).full_tensor(), values({4, 4})));
  });
}

TEST(Visualize, ShowsWhichRankHoldsWhat) {
  const auto mesh = init_device_mesh(comm::fake_world(0, 4), {2, 2}, {"dp", "tp"});
  const auto text = visualize(zeros({7, 4}, mesh, {Shard{0}, Shard{1}}));
  EXPECT_CONTAINS(text, "0:4         0           1", "4:7         2           3");
  EXPECT_CONTAINS(visualize(zeros({6}, mesh, {Replicate{}, Shard{0}})), "0,2");
  EXPECT_ERROR(visualize(zeros({2, 2, 2}, mesh, {Shard{0}, Shard{1}})),
               "tensors of 1 or 2 dimensions, found 3");
}

TEST(CommunicationScope, CountsCallsAndBytesByMeshDimension) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    const auto x = distribute_tensor(at::zeros({4, 4}), mesh, {Replicate{}, Shard{0}});
    const CommunicationScope communication(mesh);
    x.full_tensor();
    EXPECT_EQ(communication.total().calls, 1);
    EXPECT_EQ(communication.total("tp").bytes, 2 * 4 * 4);
    EXPECT_EQ(communication.total("dp").calls, 0);
    EXPECT_CONTAINS(communication.report(), "all_gather");
  });
}

TEST(CommunicationScope, ListsTheCallsInOrderWithWhatTheyAreFor) {
  const testing::DebugChecks none("0");
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    const auto x =
        distribute_tensor(values({4, 6}), mesh, {Replicate{}, Shard{1}}).tensor().detach();
    x.requires_grad_();
    const at::Tensor w = distribute_tensor(values({6, 2}), mesh, {Replicate{}, Shard{0}});
    x.mm(w).sum();
    const CommunicationScope communication(mesh);
    DistributedTensor(x.mm(w))
        .redistribute({Shard{0}, Replicate{}})
        .tensor()
        .exp()
        .sum()
        .backward();
    x.detach().softmax(1);
    std::string found;
    for (const auto& call : communication.calls()) {
      found += call.group + " " + call.collective + " " + std::to_string(call.bytes) + " " +
               call.purpose + "\n";
    }
    EXPECT_EQ(found,
              "tp all_reduce 32 redistribute\n"
              "dp all_gather 32 redistribute in RedistributeBackward\n"
              "tp all_gather 96 aten::_softmax\n");
    const std::string listing = communication.listing();
    EXPECT_EQ(std::count(listing.begin(), listing.end(), '\n'), 4) << listing;
  });
}

TEST(Agreement, NamesTheRanksThatDiffer) {
  const auto errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    const auto mesh = rank.mesh({2}, {"x"});
    check_agreement(DistributedTensor::from_local(at::zeros({3}), mesh, {Shard{0}}));
    const std::vector<std::int64_t> sizes{rank.rank() == 0 ? 6 : 7};
    check_agreement(DistributedTensor::from_local(at::zeros({3}), mesh, {Shard{0}}, sizes));
  });
  EXPECT_CONTAINS(errors[0], "ranks 1");
  EXPECT_CONTAINS(errors[1], "[7]");
}

TEST(RedistributeOptions, CastForwardAndBackward) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const auto x = distribute_tensor(values({4, 4}), mesh, {Shard{0}}).tensor().detach();
    x.requires_grad_();
    const auto y = DistributedTensor(x).redistribute(
        {Replicate{}}, {.forward_dtype = at::kFloat, .backward_dtype = at::kBFloat16});
    EXPECT_EQ(y.tensor().scalar_type(), at::kFloat);
    y.tensor().mul(1.0 + 1e-4).sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), at::kDouble);
    EXPECT_TRUE(
        at::equal(DistributedTensor(x.grad()).full_tensor(), at::ones({4, 4}, at::kDouble)));
  });
}

TEST(Factories, MakeTheValuesOfTheirPlainNamesakes) {
  RunOnMesh({2, 2}, {"a", "b"}, [](const DeviceMesh& mesh) {
    for (const auto& placements :
         {Placements{Shard{0}, Replicate{}}, Placements{Shard{0}, Shard{0}},
          Placements{Partial{}, Shard{0}}, Placements{Replicate{}, Partial{}}}) {
      EXPECT_TRUE(at::equal(zeros({5, 3}, mesh, placements).full_tensor(), at::zeros({5, 3})));
      EXPECT_TRUE(at::equal(ones({5, 3}, mesh, placements).full_tensor(), at::ones({5, 3})));
      EXPECT_TRUE(at::equal(full({5}, 2.5, mesh, placements, at::kDouble).full_tensor(),
                            at::full({5}, 2.5, at::kDouble)));
      EXPECT_TRUE(
          at::equal(arange(2, 12, 3, mesh, placements).full_tensor(), at::arange(2, 12, 3)));
      EXPECT_TRUE(
          at::equal(arange(5, 0, -2, mesh, placements).full_tensor(), at::arange(5, 0, -2)));
      EXPECT_EQ(DistributedTensor(zeros({5, 3}, mesh, placements)).placements(), placements);
    }
  });
}

TEST(Factories, MakeRoomWithoutValues) {
  RunRanks(4, [](Rank& rank) {
    const auto made =
        empty({5, 3}, rank.mesh({4}, {"x"}), {Shard{0}}, at::TensorOptions(at::kDouble));
    EXPECT_EQ(made.tensor().sizes(), (at::IntArrayRef{5, 3}));
    EXPECT_EQ(made.tensor().scalar_type(), at::kDouble);
    EXPECT_EQ(made.to_local().size(0), rank.rank() < 2 ? 2 : rank.rank() == 2 ? 1 : 0);
  });
}

TEST(Factories, DrawTheSameRandomTensorOnEveryMesh) {
  for (const auto draw : {&tessera::rand, &tessera::randn}) {
    at::Tensor expected;
    RunRanks(1, [&](Rank& rank) {
      expected = draw({5, 3}, {1, 2}, rank.mesh({1}, {"x"}), {Replicate{}}, {}).full_tensor();
    });
    EXPECT_EQ(expected.ge(0).logical_and(expected.le(1)).all().item<bool>(),
              draw == &tessera::rand);
    RunOnMesh({2, 2}, {"a", "b"}, [&](const DeviceMesh& mesh) {
      EXPECT_TRUE(
          at::equal(draw({5, 3}, {1, 2}, mesh, {Shard{1}, Shard{0}}, {}).full_tensor(), expected));
      EXPECT_TRUE(
          at::equal(draw({5, 3}, {1, 2}, mesh, {Partial{}, Shard{0}}, {}).full_tensor(), expected));
    });
  }
}

}  // namespace
}  // namespace tessera
