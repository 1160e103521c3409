// Ranks that run different units where the communicator does not notice: Gloo's and NCCL's move any
// tensors of the same size.
#include <gmock/gmock.h>

#include <cstdlib>

#include "fsdp/training/training.h"
#include "fsdp/unit.h"
#include "testing/environment.h"

namespace tessera::fsdp {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using testing::ErrorsOfRanks;
using ::testing::HasSubstr;
using testing::RanksOptions;

class Disagreement : public ::testing::Test {
 protected:
  const testing::SharedMemory without_shared_memory_{false};
};

/// Two units of one size. A call computes both and returns what it was asked for, or computes only
/// that.
struct Pair : nn::Module<Pair> {
  explicit Pair(const DeviceMesh& mesh, const Options& options = {}) {
    testing::fill(*this);
    fully_shard(*a, mesh, options);
    fully_shard(*b, mesh, options);
    fully_shard(*this, mesh, options.reshard_after_forward ? Options{} : options);
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
  at::Tensor inner;  ///< the result of the unit that was taken
};

at::Tensor input() {
  return testing::uniform_values({4, 3}, 9);
}

at::Tensor run_one(Pair& model, bool take_a) {
  return model(input(), take_a, false);
}
at::Tensor run_both(Pair& model, bool take_a) {
  return model(input(), take_a, true);
}

const auto kNamed = AllOf(HasSubstr("unit 'a'"), HasSubstr("unit 'b'"), HasSubstr("may_be_unused"));

TEST_F(Disagreement, HandOutNoResult) {
  for (const bool with_gradients : {false, true}) {
    const std::vector<std::string> errors = ErrorsOfRanks(3, [&](Rank& rank) {
      Pair model(rank.mesh({3}, {"dp"}));
      const c10::AutoGradMode grad(with_gradients);
      run_one(model, rank.rank() == 1);
    });
    EXPECT_THAT(errors, Each(kNamed));
  }
}

// Frozen: nothing is reduced.
TEST_F(Disagreement, AreNamedInBackward) {
  const std::vector<std::string> errors = ErrorsOfRanks(3, [](Rank& rank) {
    Pair model(rank.mesh({3}, {"dp"}), {.reshard_after_forward = true});
    for (const auto& [name, slot] : model.named_slots()) {
      slot->get().set_requires_grad(false);
    }
    const at::Tensor x = input().requires_grad_();
    model(x, rank.rank() == 1, true).sum().backward();
  });
  EXPECT_THAT(errors, Each(kNamed));
}

TEST_F(Disagreement, IsNamedBetweenNeighbours) {
  const std::vector<std::string> errors = ErrorsOfRanks(4, [](Rank& rank) {
    Pair model(rank.mesh({4}, {"dp"}),
               {.reshard_after_forward = true, .post_forward_mesh_size = 2});
    for (const auto& [name, slot] : model.named_slots()) {
      slot->get().set_requires_grad(false);
    }
    const at::Tensor x = input().requires_grad_();
    // Neighbours gather nothing but this; the other pair receives the error.
    model(x, rank.rank() != 1, true).sum().backward();
  });
  EXPECT_THAT(errors[0], AllOf(HasSubstr("'dp/2' (ranks 0, 1)"), kNamed));
  EXPECT_THAT(errors[1], AllOf(HasSubstr("'dp/2' (ranks 0, 1)"), kNamed));
  EXPECT_THAT(errors[2], AllOf(HasSubstr("'dp' (ranks 0, 1, 2, 3)"), kNamed));
  EXPECT_THAT(errors[3], AllOf(HasSubstr("'dp' (ranks 0, 1, 2, 3)"), kNamed));
}

/// Ranks that continue after an error compute what one rank does.
TEST_F(Disagreement, LeavesNothingWrongBehind) {
  const auto alone = [](bool gradient) {
    Filled<nn::Linear> a(3, 3);
    const at::Tensor out = a(input());
    out.sum().backward();
    return gradient ? a.weight->grad() : out.detach();
  };
  RunRanks(2, [&](Rank& rank) {
    for (const bool reshard : {false, true}) {
      Pair model(rank.mesh({2}, {"dp"}), {.reshard_after_forward = reshard});
      run_one(model, true).sum().backward();
      EXPECT_ERROR(run_one(model, rank.rank() == 0), "calls since the last agreement differ",
                   "for unit 'a'", "for unit 'b'");
      EXPECT_FALSE(model.a->attached<Unit>()->unsharded());
      EXPECT_TRUE(model.a->slot("weight")->persistent().grad().defined());  // of the step before
      set_reshard_after_backward(model, false);
      EXPECT_ERROR(run_both(model, rank.rank() == 0).sum().backward(),
                   "calls since the last agreement differ", "for unit 'a'", "for unit 'b'");
      for (const auto& [name, slot] : model.named_slots()) {
        EXPECT_FALSE(slot->persistent().grad().defined()) << name;
        EXPECT_TRUE(tessera::is_distributed(slot->get())) << name;
      }
      const at::Tensor out = run_one(model, true);
      EXPECT_TRUE(out.allclose(alone(false)));
      out.sum().backward();
      EXPECT_TRUE(full_tensor(model.a->slot("weight")->persistent().grad()).allclose(alone(true)));
    }
  });
}

TEST_F(Disagreement, ForgetsWhatMicroBatchesHaveKept) {
  RunRanks(2, [](Rank& rank) {
    Pair model(rank.mesh({2}, {"dp"}), {.reshard_after_forward = true});
    set_requires_gradient_sync(model, false);
    run_both(model, true).sum().backward();
    EXPECT_ERROR(run_both(model, rank.rank() == 0).sum().backward(),
                 "calls since the last agreement differ", "for unit 'a'",
                 "for unit 'b'");  // gathers differ
    set_requires_gradient_sync(model, true);
    run_one(model, false).sum().backward();
    EXPECT_FALSE(model.a->slot("weight")->persistent().grad().defined());
    EXPECT_TRUE(model.b->slot("weight")->persistent().grad().defined());
  });
}

/// Only ranks 0 and 1, one replica, differ; what they reduce goes to all.
TEST_F(Disagreement, IsReportedToTheOtherReplicas) {
  for (const bool reshard : {false, true}) {
    const std::vector<std::string> errors = ErrorsOfRanks(4, [&](Rank& rank) {
      Pair model(rank.mesh({2, 2}, {"replicate", "shard"}), {.reshard_after_forward = reshard});
      run_both(model, rank.rank() != 1).sum().backward();
    });
    EXPECT_THAT(errors, Each(kNamed));
    EXPECT_THAT(errors[2], HasSubstr("on rank 0;"));
  }
}

/// Backward from there begins below the root: what is reduced last is the unit that was taken.
at::Tensor run_below_root(Pair& model, bool take_a) {
  model.keep_inner = true;
  run_both(model, take_a);
  model.keep_inner = false;
  return std::exchange(model.inner, {});
}

TEST_F(Disagreement, IsNamedInTheLastReductionOfReplicas) {
  const std::vector<std::string> errors = ErrorsOfRanks(4, [](Rank& rank) {
    Pair model(rank.mesh({2, 2}, {"replicate", "shard"}), {.reshard_after_forward = false});
    run_below_root(model, rank.rank() < 2).sum().backward();
  });
  EXPECT_THAT(errors, Each(kNamed));
}

TEST_F(Disagreement, ForgetsReductionsUnderWay) {
  RunRanks(2, [](Rank& rank) {
    Pair model(rank.mesh({2}, {"dp"}), {.reshard_after_forward = false});
    set_is_last_backward(model, false);
    EXPECT_ERROR(run_below_root(model, rank.rank() == 0).sum().backward(),
                 "calls since the last agreement differ", "for unit 'a'", "for unit 'b'");
    set_is_last_backward(model, true);
    run_one(model, false).sum().backward();
    EXPECT_FALSE(model.a->slot("weight")->persistent().grad().defined());
    EXPECT_TRUE(full_tensor(model.b->slot("weight")->persistent().grad())
                    .allclose(input().sum(0).expand({3, 3})));
  });
}

// Nothing crosses replicas in forward: one may evaluate more than the other.
TEST_F(Disagreement, IsNoneWhereReplicasEvaluateByThemselves) {
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

TEST_F(Disagreement, IsNamedForReplicatedUnits) {
  const std::vector<std::string> errors = ErrorsOfRanks(2, [](Rank& rank) {
    struct Replicated : nn::Module<Replicated> {
      at::Tensor forward(const at::Tensor& x, bool take_a) { return (take_a ? *a : *b)(x); }
      nn::Child<nn::Linear> a{*this, "a", 3, 3}, b{*this, "b", 3, 3};
    } model;
    testing::fill(model);
    const DeviceMesh mesh = rank.mesh({2}, {"dp"});
    replicate(*model.a, mesh);
    replicate(*model.b, mesh);
    replicate(model, mesh);
    model(input(), rank.rank() == 0).sum().backward();
  });
  EXPECT_THAT(errors, Each(kNamed));
}

TEST_F(Disagreement, NamesAUnitThatOneRankSkipsAtTheTimeOutWhereGathersWait) {
  const RanksOptions options{.world = {.timeout = std::chrono::seconds(2)}};
  const std::vector<std::string> errors = ErrorsOfRanks(
      3,
      [](Rank& rank) {
        Pair model(rank.mesh({3}, {"dp"}));
        model(input(), true, rank.rank() != 2);
      },
      options);
  EXPECT_THAT(errors[0], HasSubstr("all_gather for unit 'b'"));
  EXPECT_THAT(errors[1], HasSubstr("all_gather for unit 'b'"));
  EXPECT_THAT(errors[2], HasSubstr("agreement on the calls in group 'dp'"));
  EXPECT_THAT(errors[2], HasSubstr("after all_gather for unit 'a'"));
}

TEST_F(Disagreement, CostsNoBytes) {
  RunRanks(2, [](Rank& rank) {
    Pair model(rank.mesh({2}, {"dp"}), {.reshard_after_forward = true});
    const comm::TrafficTable before = rank.world()->traffic().table();
    run_both(model, true).sum().backward();
    const comm::TrafficTable traffic = rank.world()->traffic().since(before);
    EXPECT_EQ(traffic.size(), 2U);
    // 2 rows of 3 and their bias; 'a' is gathered again in backward.
    const std::int64_t bytes = 4 * testing::packed_numel({2 * 3, 2});
    EXPECT_EQ(testing::traffic_of(traffic, "dp", "all_gather").bytes, 3 * bytes);
    EXPECT_EQ(testing::traffic_of(traffic, "dp", "reduce_scatter").bytes, 2 * bytes);
  });
}

}  // namespace
}  // namespace tessera::fsdp
