// What is wrong is said before anything is sent or changed.
#include <gtest/gtest.h>

#include <cmath>

#include "fsdp/training.h"
#include "tessera/core/error.h"
#include "tessera/fsdp/collectives.h"
#include "tessera/fsdp/policy.h"

namespace tessera::fsdp {
namespace {

using testing::SmallModel;

/// The message of the Error that `act` throws on each of two ranks, which have sent nothing by
/// then.
std::string error_of(const std::function<void(Rank&, SmallModel&)>& act) {
  std::string message;
  RunRanks(2, [&](Rank& rank) {
    SmallModel model(4, 6, 2, 2);
    testing::fill(model);
    try {
      act(rank, model);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      if (rank.rank() == 0) message = error.what();
    }
    EXPECT_TRUE(rank.world()->traffic().table().empty());
    for (const auto& [name, slot] : model.blocks[0]->named_slots()) {
      EXPECT_FALSE(tessera::is_distributed(slot->get())) << name;
    }
  });
  return message;
}

bool mentions(const std::string& message, const std::string& text) {
  return message.find(text) != std::string::npos;
}

TEST(BadInput, NoMesh) {
  const std::string error =
      error_of([](Rank&, SmallModel& model) { fully_shard(model, DeviceMesh()); });
  EXPECT_TRUE(mentions(error, "undefined")) << error;
}

TEST(BadInput, MeshOfNoRanks) {
  const std::string error =
      error_of([](Rank& rank, SmallModel& model) { fully_shard(model, rank.mesh({0}, {"dp"})); });
  EXPECT_TRUE(mentions(error, "0")) << error;
}

TEST(BadInput, UnknownMeshDimension) {
  const std::string error = error_of(
      [](Rank& rank, SmallModel& model) { fully_shard(model, rank.mesh({2}, {"dp"})["pd"]); });
  EXPECT_TRUE(mentions(error, "pd") && mentions(error, "dp")) << error;
}

TEST(BadInput, UnnamedDimensionsThatCannotBeToldApart) {
  const std::string error = error_of([](Rank& rank, SmallModel& model) {
    fully_shard(model, rank.mesh({1, 2}, {}));
  });
  EXPECT_TRUE(mentions(error, "name")) << error;
}

TEST(BadInput, NeighboursThatDoNotDivide) {
  const std::string error = error_of([](Rank& rank, SmallModel& model) {
    fully_shard(*model.blocks[0], rank.mesh({2}, {"dp"}), {.neighbours = 3});
  });
  EXPECT_TRUE(mentions(error, "neighbours = 3")) << error;
}

TEST(BadInput, PlanOfAnotherModel) {
  const std::string error = error_of([](Rank& rank, SmallModel& model) {
    WrapPlan plan = plan_units(model, wrap_named("block*"));
    plan.front().fqn = "block7";
    fully_shard(model, rank.mesh({2}, {"dp"}), plan);
  });
  EXPECT_TRUE(mentions(error, "block7")) << error;
}

TEST(BadInput, PrefetchOfAModuleThatIsNoUnit) {
  const std::string error = error_of([](Rank& rank, SmallModel& model) {
    fully_shard(*model.head, rank.mesh({2}, {"dp"}));
    set_forward_prefetch(*model.head, {model.blocks[0].get()});
  });
  EXPECT_TRUE(mentions(error, "not a unit")) << error;
}

TEST(BadInput, PrefetchOfNoModule) {
  const std::string error = error_of([](Rank& rank, SmallModel& model) {
    fully_shard(*model.head, rank.mesh({2}, {"dp"}));
    set_backward_prefetch(*model.head, {nullptr});
  });
  EXPECT_TRUE(mentions(error, "set_backward_prefetch was given a null module")) << error;
}

TEST(BadInput, HookOnAModuleWithoutUnits) {
  const std::string error = error_of(
      [](Rank&, SmallModel& model) { set_all_reduce_hook(*model.head, [](const at::Tensor&) {}); });
  EXPECT_TRUE(mentions(error, "set_all_reduce_hook")) << error;
}

TEST(BadInput, ComputationInIntegers) {
  for (const MixedPrecisionPolicy& policy :
       {MixedPrecisionPolicy{.param_dtype = at::kInt}, {.reduce_dtype = at::kInt}}) {
    const std::string error = error_of([&](Rank& rank, SmallModel& model) {
      fully_shard(model, rank.mesh({2}, {"dp"}), {.mp_policy = policy});
    });
    EXPECT_TRUE(mentions(error, "mp_policy names Int")) << error;
  }
}

TEST(BadInput, EmptyPolicy) {
  const std::string error = error_of([](Rank&, SmallModel& model) { plan_units(model, Policy()); });
  EXPECT_TRUE(mentions(error, "empty policy")) << error;
}

TEST(BadInput, DivideFactor) {
  for (const double factor : {0.0, -2.0, HUGE_VAL, std::nan("")}) {
    const std::string error = error_of([&](Rank& rank, SmallModel& model) {
      fully_shard(*model.head, rank.mesh({2}, {"dp"}));
      set_gradient_divide_factor(model, factor);
    });
    EXPECT_TRUE(mentions(error, "not positive and finite")) << error;
  }
}

TEST(BadInput, AUnitBelowAnother) {
  const std::string error = error_of([](Rank& rank, SmallModel& model) {
    const DeviceMesh mesh = rank.mesh({2}, {"dp"});
    fully_shard(*model.blocks[1], mesh);
    fully_shard(*model.blocks[1]->up, mesh);
  });
  EXPECT_TRUE(mentions(error, "'weight' is split over") && mentions(error, "lower modules first"))
      << error;
}

}  // namespace
}  // namespace tessera::fsdp
