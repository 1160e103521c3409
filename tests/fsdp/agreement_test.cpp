// Tests ranks that disagree about a replicated parameter, about the seed of a sharded parameter,
// about the parameters of a unit, or about the units that run.

#include <chrono>

#include "fsdp/training/training.h"
#include "fsdp/unit.h"
#include "tessera/nn/initialization.h"
#include "testing/environment.h"

namespace tessera::fsdp::agreement {

using testing::DebugChecks;

// Replicated parameters are compared before the first forward. With TESSERA_DEBUG=1, the parameters
// and their gradients are also compared after each backward.

void fill_differently(SmallModel& model, const Rank& rank) {
  testing::fill(model);
  if (rank.rank() > 0) {
    model.head->weight->detach()[1][2] = rank.rank();
  }
}

TEST_ON_RANKS(CopyAgreement, FailsInForwardUntilReplicasAreEqual, 3) {
  SmallModel model(kDim, kHidden, kClasses);
  fill_differently(model, rank);
  replicate(model, rank.mesh({3}, {"dp"}));
  for (int i = 0; i < 2; ++i) {
    EXPECT_ERROR(local_loss(model, rank), "the root unit", "'head.weight'", "rank 0", "ranks 1, 2",
                 "[1, 2]");
  }
  testing::fill(model);
  local_loss(model, rank).backward();
}

TEST(CopyAgreement, ComparesTheReplicasOfShards) {
  const auto errors = ErrorsOfRanks(4, [](Rank& rank) {
    Filled<SmallModel> model(kDim, kHidden, kClasses);
    if (rank.rank() == 3) {
      model.head->bias->detach()[2] = 5;
    }
    shard(model, rank.mesh({2, 2}, {"replicate", "shard"}));
    local_loss(model, rank);
  });
  EXPECT_CONTAINS(errors[1], "'head.bias'", "rank 1", "ranks 3", "[0]");
  EXPECT_CONTAINS(errors[3], "5 on rank 3");
}

TEST(CopyAgreement, ComparesReplicatedParametersOfAShardedUnit) {
  const auto errors = ErrorsOfRanks(2, [](Rank& rank) {
    SmallModel model(kDim, kHidden, kClasses);
    fill_differently(model, rank);
    shard(model, rank.mesh({2}, {"dp"}),
          {.shard_placement = [](auto&, auto&) { return std::optional(Placement(Replicate{})); }});
    local_loss(model, rank);
  });
  EXPECT_CONTAINS(errors[0], "'head.weight'", "rank 0", "ranks 1");
}

TEST(CopyAgreement, ComparesParametersAndGradientsAgainWithDebugChecks) {
  const DebugChecks checks("1");
  for (const bool of_gradient : {false, true}) {
    const auto errors = ErrorsOfRanks(2, [&](Rank& rank) {
      Filled<SmallModel> model(kDim, kHidden, kClasses);
      replicate(model, rank.mesh({2}, {"dp"}));
      local_loss(model, rank).backward();
      const at::Tensor weight = model.head->slot("weight")->persistent();
      local_tensor(of_gradient ? weight.grad() : weight).add_(rank.rank());
      local_loss(model, rank).backward();
    });
    EXPECT_CONTAINS(errors,
                    of_gradient ? "gradient of parameter 'head.weight'" : "parameter 'head.weight'",
                    "rank 0", "ranks 1");
  }
}

TEST(ParameterSeeds, MustBeEqualOnAllRanks) {
  RunRanks(3, [](Rank& rank) {
    SmallModel model(kDim, kHidden, kClasses);
    nn::init_weights(model, rank.rank() == 2 ? 1 : 0);
    shard(model, rank.mesh({3}, {"dp"}));
    EXPECT_ERROR(local_loss(model, rank), "'head.weight'", "rank 0 and rank 2",
                 "different tensors");
  });
  RunRanks(4, [](Rank& rank) {
    const auto model = testing::made_on_meta<SmallModel>(kDim, kHidden, kClasses);
    shard(*model, rank.mesh({2, 2}, {"replicate", "shard"}));
    nn::to_empty(*model, c10::kCPU);
    nn::init_weights(*model, static_cast<std::uint64_t>(rank.rank() % 2));
    EXPECT_ERROR(local_loss(*model, rank), "different tensors", "seed");
  });
}

// With TESSERA_DEBUG=1, ranks compare the parameters of a unit before the unit's first gather.

// The head has 3 rows on rank 0 and 4 rows on rank 1. Both ranks' shards are padded to 2 rows.
TEST(ParameterAgreement, NamesTheParameterThatDiffers) {
  const DebugChecks checks("1");
  const auto errors = ErrorsOfRanks(2, [](Rank& rank) {
    Filled<SmallModel> model(kDim, kHidden, rank.rank() == 0 ? 3 : 4);
    shard(model, rank.mesh({2}, {"dp"}));
    local_loss(model, rank).backward();
  });
  EXPECT_CONTAINS(errors, "the root unit", "'head.weight'");
  EXPECT_CONTAINS(errors[0], "rank 0", "[3, 7]");
  EXPECT_CONTAINS(errors[1], "rank 1", "[4, 7]");
}

TEST(ParameterAgreement, ComparesTheNumberOfParameters) {
  const DebugChecks checks("1");
  const auto errors = ErrorsOfRanks(3, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 3, {.bias = rank.rank() != 1});
    fully_shard(linear, rank.mesh({3}, {"dp"}));
    linear(uniform_values({2, 3}, 1));
  });
  EXPECT_CONTAINS(errors, "rank 0 has 2 parameters, rank 1 has 1");
}

// Ranks 0 and 1 shard one head, ranks 2 and 3 another. Rank 1's head has a wrong shape.
TEST(ParameterAgreement, ComparesParametersOnTheirOwnMesh) {
  const DebugChecks checks("1");
  const auto errors = ErrorsOfRanks(4, [](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2, 2}, {"ep", "edp"});
    Filled<SmallModel> model(kDim, kHidden, rank.rank() == 1 ? 3 : 4);
    fully_shard(*model.head, mesh.flatten("dp"),
                {.parameter_mesh = [&](auto&, auto&) { return std::optional(mesh["edp"]); }});
    shard(model, mesh["dp"]);
    local_loss(model, rank).backward();
  });
  EXPECT_CONTAINS(errors[0], "unit 'head'");
  EXPECT_CONTAINS(errors[1], "unit 'head'");
}

// Tests ranks that run different units. Gloo and NCCL do not notice the difference, because the
// tensors of the units have equal sizes.

class UnitMismatch : public ::testing::Test {
 protected:
  const testing::SharedMemory without_shared_memory_{false};
};

/// A model with two units of equal sizes, `a` and `b`. A call runs one unit or both units.
struct Pair : nn::Module<Pair> {
  explicit Pair(const DeviceMesh& mesh, const Options& options = {}, bool frozen = false) {
    testing::fill(*this);
    shard_units({&*a, &*b}, mesh, options);
    fully_shard(*this, mesh, options.reshard_after_forward ? Options{} : options);
    for (const auto& [name, slot] : named_slots()) {
      slot->get().set_requires_grad(!frozen);
    }
  }
  at::Tensor forward(const at::Tensor& x, bool take_a, bool run_both) {
    const at::Tensor from_a = run_both || take_a ? (*a)(x) : at::Tensor();
    const at::Tensor from_b = run_both || !take_a ? (*b)(x) : at::Tensor();
    if (keep_inner) {
      inner = take_a ? from_a : from_b;
    }
    return (take_a ? from_a : from_b).mul(1);
  }
  nn::Child<nn::Linear> a{*this, "a", 3, 3}, b{*this, "b", 3, 3};
  bool keep_inner = false;
  at::Tensor inner;
};

at::Tensor input() {
  return uniform_values({4, 3}, 9);
}

at::Tensor run_one(Pair& model, bool take_a) {
  return model(input(), take_a, false);
}
at::Tensor run_both(Pair& model, bool take_a) {
  return model(input(), take_a, true);
}

void expect_both_named(const std::vector<std::string>& errors) {
  EXPECT_CONTAINS(errors, "unit 'a'", "unit 'b'", "every rank must call");
}

at::Tensor run_below_root(Pair& model, bool take_a) {
  model.keep_inner = true;
  run_both(model, take_a);
  model.keep_inner = false;
  return std::exchange(model.inner, {});
}

struct Difference {
  const char* name;
  std::vector<std::int64_t> sizes;
  Options options;
  bool frozen;
  std::function<void(Pair&, int rank)> act;
};

// In each case the ranks run different units. All ranks must throw before any rank returns a wrong
// result.
TEST_F(UnitMismatch, IsReportedOnEveryRank) {
  const Options zero3{.reshard_after_forward = true}, zero2{.reshard_after_forward = false};
  const auto both = [](Pair& model, int rank) { run_both(model, rank != 1).sum().backward(); };
  const std::vector<Difference> rows{
      {"forward", {3}, {}, false, [](Pair& model, int rank) { run_one(model, rank == 1); }},
      {"evaluation",
       {3},
       {},
       false,
       [](Pair& model, int rank) {
         const c10::AutoGradMode no_grad(false);
         run_one(model, rank == 1);
       }},
      {"frozen",
       {3},
       zero3,
       true,
       [](Pair& model, int rank) {
         model(input().requires_grad_(), rank == 1, true).sum().backward();
       }},
      {"other replica, ZeRO-3", {2, 2}, zero3, false, both},
      {"other replica, ZeRO-2", {2, 2}, zero2, false, both},
      {"last reduction", {2, 2}, zero2, false, [](Pair& model, int rank) {
         run_below_root(model, rank < 2).sum().backward();
       }}};
  for (const Difference& row : rows) {
    SCOPED_TRACE(row.name);
    const bool hybrid = row.sizes.size() == 2;
    expect_both_named(ErrorsOfRanks(testing::ranks_of(row.sizes), [&](Rank& rank) {
      Pair model(
          hybrid ? rank.mesh(row.sizes, {"replicate", "shard"}) : rank.mesh(row.sizes, {"dp"}),
          row.options, row.frozen);
      row.act(model, rank.rank());
    }));
  }
}

TEST_F(UnitMismatch, InASubgroupNamesTheSubgroup) {
  const std::vector<std::string> errors = ErrorsOfRanks(4, [](Rank& rank) {
    Pair model(rank.mesh({4}, {"dp"}), {.reshard_after_forward = true, .post_forward_mesh_size = 2},
               /*frozen=*/true);
    // Ranks 0 and 1 (process group 'dp/2') run different units. Ranks 2 and 3 must also throw.
    model(input().requires_grad_(), rank.rank() != 1, true).sum().backward();
  });
  expect_both_named(errors);
  for (const std::size_t rank : {0, 1, 2, 3}) {
    EXPECT_CONTAINS(errors[rank], rank < 2 ? "'dp/2' (ranks 0, 1)" : "'dp' (ranks 0, 1, 2, 3)");
  }
}

/// After the error, the ranks continue and compute the same values as a single rank.
TEST_F(UnitMismatch, AllowsACorrectNextStep) {
  Filled<nn::Linear> alone(3, 3);
  const at::Tensor expected = alone(input());
  expected.sum().backward();
  RunRanks(2, [&](Rank& rank) {
    for (const bool reshard : {false, true}) {
      Pair model(rank.mesh({2}, {"dp"}), {.reshard_after_forward = reshard});
      run_one(model, true).sum().backward();
      EXPECT_ERROR(run_one(model, rank.rank() == 0), "unit 'a'", "unit 'b'");
      EXPECT_FALSE(model.a->attached<Unit>()->unsharded());
      EXPECT_TRUE(model.a->slot("weight")->persistent().grad().defined());
      set_reshard_after_backward(model, false);
      EXPECT_ERROR(run_both(model, rank.rank() == 0).sum().backward(), "unit 'a'", "unit 'b'");
      expect_all_sharded(model);
      for (const auto& [name, slot] : model.named_slots()) {
        EXPECT_FALSE(slot->persistent().grad().defined()) << name;
      }
      const at::Tensor out = run_one(model, true);
      EXPECT_TRUE(out.allclose(expected));
      out.sum().backward();
      EXPECT_TRUE(full_grad(*model.a).allclose(alone.weight->grad()));
    }
  });
}

TEST_F(UnitMismatch, DropsAccumulatedAndPendingGradients) {
  RunRanks(2, [](Rank& rank) {
    for (const bool keeps_gradients : {true, false}) {
      Pair model(rank.mesh({2}, {"dp"}), {.reshard_after_forward = keeps_gradients});
      const auto set_last = [&](bool last) {
        keeps_gradients ? set_requires_gradient_sync(model, last)
                        : set_is_last_backward(model, last);
      };
      set_last(false);
      if (keeps_gradients) {
        run_both(model, true).sum().backward();
        EXPECT_ERROR(run_both(model, rank.rank() == 0).sum().backward(), "unit 'a'", "unit 'b'");
      } else {
        EXPECT_ERROR(run_below_root(model, rank.rank() == 0).sum().backward(), "unit 'a'",
                     "unit 'b'");
      }
      set_last(true);
      run_one(model, false).sum().backward();
      EXPECT_FALSE(model.a->slot("weight")->persistent().grad().defined());
      EXPECT_TRUE(full_grad(*model.b).allclose(input().sum(0).expand({3, 3})));
    }
  });
}

// Forward calls no collective over replicas, so one replica can evaluate without the others.
TEST_F(UnitMismatch, IgnoresEvaluationByOneReplica) {
  RunRanks(4, [](Rank& rank) {
    Pair model(rank.mesh({2, 2}, {"replicate", "shard"}));
    {
      const c10::AutoGradMode no_grad(false);
      for (int i = 0; i < 1 + rank.rank() / 2; ++i) {
        run_one(model, rank.rank() < 2);
      }
    }
    run_both(model, true).sum().backward();
  });
}

TEST_F(UnitMismatch, IsReportedAtTheTimeoutIfARankSkipsAUnit) {
  const testing::RanksOptions options{.world = {.timeout = std::chrono::seconds(2)}};
  const std::vector<std::string> errors = ErrorsOfRanks(
      3,
      [](Rank& rank) {
        Pair model(rank.mesh({3}, {"dp"}));
        model(input(), true, rank.rank() != 2);
      },
      options);
  EXPECT_CONTAINS(errors[0], "all_gather for unit 'b'");
  EXPECT_CONTAINS(errors[1], "all_gather for unit 'b'");
  EXPECT_CONTAINS(errors[2], "'dp'", "all_gather for unit 'a'");
}

// Also tests the shared-memory communicator, which itself compares the ranks' calls.
TEST(DifferentReductions, AreReportedOnEveryRank) {
  for (const bool shared : {false, true}) {
    const testing::SharedMemory shared_memory(shared);
    const std::vector<std::string> errors = ErrorsOfRanks(4, [](Rank& rank) {
      Pair model(rank.mesh({4}, {"dp"}), {.reshard_after_forward = false});
      run_below_root(model, rank.rank() < 2).sum().backward();
    });
    for (std::size_t rank = 0; rank < errors.size(); ++rank) {
      EXPECT_CONTAINS(errors[rank], rank < 2 ? "unit 'a'" : "unit 'b'");
    }
    const auto divided_differently = [](Rank& rank) {
      Pair model(rank.mesh({2}, {"dp"}));
      if (rank.rank() == 1) {
        set_gradient_divide_factor(model, 7);
      }
      run_both(model, true).sum().backward();
    };
    EXPECT_CONTAINS(ErrorsOfRanks(2, divided_differently), "(divided by 7)");
  }
}

}  // namespace tessera::fsdp::agreement
