#include <torch/optim/adamw.h>

#include <sstream>

#include "tessera/comm/trace.h"
#include "tessera/dtensor/communication_scope.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/factories.h"
#include "testing/distributed.h"
#include "testing/environment.h"

namespace tessera {

namespace {

using testing::values;

TEST_ON_MESH(CommunicationScope, CountsCallsAndBytesByMeshDimension, {2, 2}, {"dp", "tp"}) {
  const auto x = distribute_tensor(at::zeros({4, 4}), mesh, {Replicate{}, Shard{0}});
  const CommunicationScope communication(mesh);
  x.full_tensor();
  EXPECT_EQ(communication.total().calls, 1);
  EXPECT_EQ(communication.total("tp").bytes, 2 * 4 * 4);
  EXPECT_EQ(communication.total("dp").calls, 0);
  EXPECT_CONTAINS(communication.report(), "all_gather");
}

TEST(CommunicationScope, ListsCallsInOrderWithTheirPurpose) {
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

TEST(CheckAgreement, NamesTheRanksThatDiffer) {
  const auto errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    const auto mesh = rank.mesh({2}, {"x"});
    check_agreement(DistributedTensor::from_local(at::zeros({3}), mesh, {Shard{0}}));
    const std::vector<std::int64_t> sizes{rank.rank() == 0 ? 6 : 7};
    check_agreement(DistributedTensor::from_local(at::zeros({3}), mesh, {Shard{0}}, sizes));
  });
  EXPECT_CONTAINS(errors[0], "ranks 1");
  EXPECT_CONTAINS(errors[1], "[7]");
}

TEST_ON_MESH(Factories, ReturnTheValuesOfTheAtenFactories, {2, 2}, {"a", "b"}) {
  for (const auto& placements :
       {Placements{Shard{0}, Replicate{}}, Placements{Shard{0}, Shard{0}},
        Placements{Partial{}, Shard{0}}, Placements{Replicate{}, Partial{}}}) {
    EXPECT_EQUAL(zeros({5, 3}, mesh, placements), at::zeros({5, 3}));
    EXPECT_EQUAL(ones({5, 3}, mesh, placements), at::ones({5, 3}));
    EXPECT_EQUAL(full({5}, 2.5, mesh, placements, at::kDouble), at::full({5}, 2.5, at::kDouble));
    EXPECT_EQ(DistributedTensor(zeros({5, 3}, mesh, placements)).placements(), placements);
  }
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
      EXPECT_EQUAL(draw({5, 3}, {1, 2}, mesh, {Shard{1}, Shard{0}}, {}), expected);
      EXPECT_EQUAL(draw({5, 3}, {1, 2}, mesh, {Partial{}, Shard{0}}, {}), expected);
    });
  }
}

DeviceMesh square(int rank) {
  return init_device_mesh(comm::fake_world(rank, 4), {2, 2}, {"dp", "tp"});
}

TEST(Printing, ShowsPlacementsMeshAndLocalValues) {
  const auto x = distribute_tensor(at::arange(7, at::kFloat), square(2), {Shard{0}, Replicate{}});
  std::ostringstream out;
  out << x;
  EXPECT_CONTAINS(out.str(), "DistributedTensor([7], Float", "dp=2, tp=2",
                  "[Shard(0), Replicate()]", "rank 2 holds [4:7]:", " 4\n 5\n 6");
}

TEST(Printing, ShowsEmptyLargeStridedScalarAndMetaTensors) {
  const Placements rows{Shard{0}, Replicate{}};
  EXPECT_CONTAINS(to_string(zeros({2}, square(3), {Shard{0}, Shard{0}})), "rank 3 holds nothing");
  EXPECT_CONTAINS(to_string(full({}, 2.5, square(3), {Replicate{}, Partial{}})), "Partial(sum)",
                  "0");
  EXPECT_EQ(to_string(DistributedTensor()), "DistributedTensor()");
  const auto two = init_device_mesh(comm::fake_world(1, 2), {2}, {"x"});
  EXPECT_CONTAINS(to_string(zeros({8}, two, {StridedShard{0, 2}})), "holds [2:4] and [6:8]");
  EXPECT_CONTAINS(to_string(zeros({64, 64}, square(0), rows)), "(2048 elements)");
  EXPECT_CONTAINS(to_string(zeros({4}, square(0), rows, at::kMeta)), "meta");
  EXPECT_EQ(detail::concat(zeros({8, 4}, square(0), rows).spec()),
            "DeviceMesh((dp=2, tp=2), cpu), [m0 | -]");
}

TEST_ON_MESH(Printing, ReducesPartialTensors, {3}, {"x"}) {
  const auto local = at::full({2}, rank.rank() + 1.0);
  const auto x = DistributedTensor::from_local(local, mesh, {Partial{}});
  EXPECT_CONTAINS(to_string(x), "Partial(sum)", "holds, reduced, [0:2]:", " 6\n 6");
  EXPECT_EQ(x.placements(), Placements{Partial{}});
}

TEST(Printing, ErrorOfPlainPrintingNamesToString) {
  for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{}, {4}, {4, 3}}) {
    const at::Tensor x = zeros(sizes, square(0), {Replicate{}, Replicate{}});
    std::ostringstream out;
    for (int i = 0; i < 2; ++i) {
      EXPECT_THROWN(c10::Error, out << x, "tessera::to_string");
    }
    EXPECT_THROWN(c10::Error, x.add(1).data_ptr<float>(), "to_local()");
    EXPECT_EQUAL(x.add(0), at::zeros(sizes));
  }
}

// With TESSERA_DEBUG=1, from_local() and distribute_tensor() compare the tensors of all ranks. All
// ranks throw, even if only one rank finds an error.

/// Returns the error message of each rank. No rank may wait for another rank that has thrown.
std::vector<std::string> errors_of(const testing::Body& body) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Rank& rank) {
    errors[static_cast<std::size_t>(rank.rank())] = testing::message_of([&] { body(rank); });
    // After the errors, the collectives of both ranks must still match.
    const auto x = distribute_tensor(at::ones({4}), rank.mesh({2}, {"x"}), {Shard{0}});
    EXPECT_EQUAL(x, at::ones({4}));
  });
  return errors;
}

/// Two ranks pass different arguments. Each rank's error must contain the text for that rank.
struct Disagreement {
  const char* what;
  testing::Body act;
  const char *of_rank_0, *of_rank_1;
};

TEST(DebugChecks, FailOnAllRanksIfTwoDiffer) {
  const testing::DebugChecks debug("1");
  const std::vector<Disagreement> rows{
      {"a failure of one rank",
       [](Rank& rank) {
         const auto local = at::zeros({rank.rank() == 0 ? 2 : 3});
         DistributedTensor::from_local(local, rank.mesh({2}, {"x"}), {Shard{0}}, {{4}});
       },
       "disagree", "rank 1 of"},
      {"types",
       [](Rank& rank) {
         const ShardingSpec spec{rank.mesh({2}, {"x"}), Layout::replicated({2}, 1)};
         const auto dtype = rank.rank() == 0 ? at::kFloat : at::kDouble;
         DistributedTensor::from_local(at::zeros({3}, dtype), spec, {3});
       },
       "Float", "Double"},
      {"sizes, before the source scatters",
       [](Rank& rank) {
         const auto own = at::zeros({rank.rank() == 0 ? 4 : 6});
         distribute_tensor(own, rank.mesh({2}, {"x"}), {Shard{0}}, 0);
       },
       "[4]", "[6]"},
      {"placements",
       [](Rank& rank) {
         distribute_tensor(at::zeros({4, 4}), rank.mesh({2}, {"x"}), {Shard{rank.rank()}});
       },
       "Shard(0)", "Shard(1)"},
      // The local sizes of both ranks differ, although both have 16 elements.
      {"sizes of a redistribution",
       [](Rank& rank) {
         const auto x = distribute_tensor(at::ones({4, 4}), rank.mesh({2}, {"x"}), {Shard{0}});
         const std::vector<std::int64_t> sizes{rank.rank() == 0 ? 2 : 8, rank.rank() == 0 ? 8 : 2};
         DistributedTensor(x.tensor().view(sizes)).full_tensor();
       },
       "[8, 2]", "[2, 8]"},
  };
  for (const Disagreement& row : rows) {
    SCOPED_TRACE(row.what);
    const auto errors = errors_of(row.act);
    EXPECT_CONTAINS(errors[0], row.of_rank_0);
    EXPECT_CONTAINS(errors[1], row.of_rank_1);
  }
}

TEST(DebugChecks, AreOnByDefaultOnlyWithoutNdebug) {
#ifdef NDEBUG
  constexpr int kByDefault = 0;
#else
  constexpr int kByDefault = 1;
#endif
  for (const auto& [value, calls] : {std::pair("0", 0), std::pair("", kByDefault)}) {
    const testing::DebugChecks debug(value);
    RunRanks(2, [calls = calls](Rank& rank) {
      DistributedTensor::from_local(at::zeros({2}), rank.mesh({2}, {"x"}), {Shard{0}});
      EXPECT_EQ(comm::total(rank.world()->traffic().table()).calls, calls);
    });
  }
}

// Compares libtorch's optimizers on distributed parameters with the optimizers on plain parameters.

TEST(LibtorchOptimizer, WorksOnDistributedParameters) {
  using Tensors = std::vector<at::Tensor>;
  const Tensors plain{values({7, 5}), values({7, 5}, 1), values({7, 5}, 2)};
  const auto train = [](const Tensors& initial) {
    Tensors p;
    for (const at::Tensor& tensor : initial) {
      p.push_back(tensor.clone().detach().requires_grad_());
    }
    torch::optim::AdamW optimizer(p, torch::optim::AdamWOptions(0.1).weight_decay(0.1));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      ((p[0] * p[1]).pow(2).sum() + (p[2] * p[2] * p[2]).sum()).backward();
      optimizer.step();
    }
    return p;
  };
  const auto expected = train(plain);
  RunOnMesh({2, 2}, {"a", "b"}, [&](const DeviceMesh& mesh) {
    const auto found = train({distribute_tensor(plain[0], mesh, {Shard{0}, Shard{0}}),
                              distribute_tensor(plain[1], mesh, {Replicate{}, Shard{1}}),
                              distribute_tensor(plain[2], mesh, {Shard{0}, Replicate{}})});
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_CLOSE(found[i], expected[i]) << i;
    }
  });
}

}  // namespace
}  // namespace tessera
