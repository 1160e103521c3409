// What is wrong is said before anything is sent or changed.
#include <c10/util/Exception.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>

#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/training/training.h"
#include "tessera/fsdp/wrap_policy.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/hooked.h"

namespace tessera::fsdp {
namespace {

/// The message of the Error that `act` throws on each of two ranks, which have sent nothing by
/// then.
std::string error_of(const std::function<void(Rank&, SmallModel&)>& act) {
  std::string message;
  RunRanks(2, [&](Rank& rank) {
    Filled<SmallModel> model(4, 6, 2, 2);
    try {
      act(rank, model);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      if (rank.rank() == 0) {
        message = error.what();
      }
    }
    EXPECT_TRUE(rank.world()->traffic().table().empty());
    for (const auto& [name, slot] : model.blocks[0]->named_slots()) {
      EXPECT_FALSE(tessera::is_distributed(slot->get())) << name;
    }
  });
  return message;
}

TEST(BadInput, NoMesh) {
  const std::string error =
      error_of([](Rank&, SmallModel& model) { fully_shard(model, DeviceMesh()); });
  EXPECT_CONTAINS(error, "undefined");
}

TEST(BadInput, MeshOfNoRanks) {
  const std::string error =
      error_of([](Rank& rank, SmallModel& model) { fully_shard(model, rank.mesh({0}, {"dp"})); });
  EXPECT_CONTAINS(error, "0");
}

TEST(BadInput, UnknownMeshDimension) {
  const std::string error = error_of(
      [](Rank& rank, SmallModel& model) { fully_shard(model, rank.mesh({2}, {"dp"})["pd"]); });
  EXPECT_CONTAINS(error, "pd", "dp");
}

TEST(BadInput, UnnamedDimensionsOfAMesh) {
  const std::string error =
      error_of([](Rank& rank, SmallModel& model) { fully_shard(model, rank.mesh({1, 2}, {})); });
  EXPECT_CONTAINS(error, "name");
}

TEST(BadInput, NeighboursThatDoNotDivide) {
  const std::string error = error_of([](Rank& rank, SmallModel& model) {
    fully_shard(*model.blocks[0], rank.mesh({2}, {"dp"}), {.post_forward_mesh_size = 3});
  });
  EXPECT_CONTAINS(error, "post_forward_mesh_size = 3");
}

TEST(BadInput, PlanOfAnotherModel) {
  const std::string error = error_of([](Rank& rank, SmallModel& model) {
    WrapPlan plan = plan_units(model, wrap_named("block*"));
    plan.front().fqn = "block7";
    apply_plan(model, rank.mesh({2}, {"dp"}), plan);
  });
  EXPECT_CONTAINS(error, "block7");
}

TEST(BadInput, PrefetchOfAModuleThatIsNoUnit) {
  const std::string error = error_of([](Rank& rank, SmallModel& model) {
    fully_shard(*model.head, rank.mesh({2}, {"dp"}));
    set_forward_prefetch(*model.head, {model.blocks[0].get()});
  });
  EXPECT_CONTAINS(error, "not a unit");
}

TEST(BadInput, PrefetchOfNoModule) {
  const std::string error = error_of([](Rank& rank, SmallModel& model) {
    fully_shard(*model.head, rank.mesh({2}, {"dp"}));
    set_backward_prefetch(*model.head, {nullptr});
  });
  EXPECT_CONTAINS(error, "set_backward_prefetch was given a null module");
}

TEST(BadInput, HookOnAModuleWithoutUnits) {
  const std::string error = error_of(
      [](Rank&, SmallModel& model) { set_all_reduce_hook(*model.head, [](const at::Tensor&) {}); });
  EXPECT_CONTAINS(error, "set_all_reduce_hook");
}

TEST(BadInput, ComputationInIntegers) {
  for (const MixedPrecisionPolicy& policy :
       {MixedPrecisionPolicy{.param_dtype = at::kInt}, {.reduce_dtype = at::kInt}}) {
    const std::string error = error_of([&](Rank& rank, SmallModel& model) {
      fully_shard(model, rank.mesh({2}, {"dp"}), {.mp_policy = policy});
    });
    EXPECT_CONTAINS(error, "mp_policy names Int");
  }
}

TEST(BadInput, EmptyPolicy) {
  const std::string error = error_of([](Rank&, SmallModel& model) { plan_units(model, Policy()); });
  EXPECT_CONTAINS(error, "empty policy");
}

TEST(BadInput, DivideFactor) {
  for (const double factor : {0.0, -2.0, HUGE_VAL, std::nan("")}) {
    const std::string error = error_of([&](Rank& rank, SmallModel& model) {
      fully_shard(*model.head, rank.mesh({2}, {"dp"}));
      set_gradient_divide_factor(model, factor);
    });
    EXPECT_CONTAINS(error, "not positive and finite");
  }
}

TEST(BadInput, AUnitBelowAnother) {
  const std::string error = error_of([](Rank& rank, SmallModel& model) {
    const DeviceMesh mesh = rank.mesh({2}, {"dp"});
    fully_shard(*model.blocks[1], mesh);
    fully_shard(*model.blocks[1]->up, mesh);
  });
  EXPECT_CONTAINS(error, "'weight' is split over", "lower modules first");
}

// Experts on a dimension that the unit's mesh, flattened, extends along as well.
TEST(BadInput, ParametersOnADimensionOfTheFlattenedMeshAreNamedWithBothMeshes) {
  RunOnMesh({2, 2}, {"dp", "ep"}, [](const DeviceMesh& mesh) {
    Filled<SmallModel> model(testing::kDim, testing::kHidden, testing::kClasses);
    nn::distribute_parameter(*model.blocks[1]->up->slot("weight"), mesh["ep"], {Shard{0}});
    const at::Tensor before = model.head->slot("weight")->get();
    EXPECT_ERROR(fully_shard(model, mesh.flatten("all")),
                 "parameter 'block1.up.weight' of a unit of ", "SmallModel", "(ep=2)", "(all=4)",
                 "Options::parameter_mesh");
    EXPECT_TRUE(model.head->slot("weight")->get().is_same(before));
    const auto rest = [mesh](const std::string& name, const at::Tensor&) {
      return name == "block1.up.weight" ? std::optional(mesh["dp"]) : std::nullopt;
    };
    fully_shard(model, mesh.flatten("all"), {.parameter_mesh = rest});
  });
}

/// Keeps what is said of batch norm.
class WarningsOfBatchNorm final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("BatchNorm") != std::string::npos) {
      heard.push_back(warning.msg());
    }
  }
  std::vector<std::string> heard;
};

struct Normed : nn::Module<Normed> {
  nn::Child<nn::Hooked<torch::nn::BatchNorm1d>> norm{*this, "norm", 4};
};

/// What is said of batch norm while `shard` makes units of a model.
std::vector<std::string> warnings_of(Normed& model, const std::function<void(Normed&)>& shard) {
  WarningsOfBatchNorm warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  shard(model);
  return warnings.heard;
}

TEST(BadInput, BatchNormOfARanksOwnRowsIsWarnedOfOnce) {
  for (const int ranks : {1, 2}) {
    RunOnMesh({ranks}, {"dp"}, [&](const DeviceMesh& mesh) {
      const std::vector<std::function<void(Normed&)>> ways = {
          [&](Normed& model) { fully_shard(model, mesh); },
          [&](Normed& model) { replicate(model, mesh); },
          [&](Normed& model) { apply_plan(model, mesh, plan_units(model, wrap_named("norm"))); }};
      for (const auto& way : ways) {
        Normed model;
        const std::vector<std::string> heard = warnings_of(model, way);
        ASSERT_EQ(heard.size(), ranks == 1 ? 0 : 1);
        if (ranks > 1) {
          EXPECT_CONTAINS(heard[0], "'norm', a ", "from this rank's part of the batch",
                          "LayerNorm");
        }
      }
    });
  }
}

TEST(BadInput, BatchNormThatIsTheUnitIsCalledSo) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    Normed model;
    const auto heard = warnings_of(model, [&](Normed& own) { fully_shard(*own.norm, mesh); });
    ASSERT_EQ(heard.size(), 1);
    EXPECT_CONTAINS(heard[0], "the unit itself, a ");
  });
}

TEST(BadInput, BatchNormInEvalModeIsNotWarnedOf) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    Normed model;
    model.norm->eval();
    EXPECT_TRUE(warnings_of(model, [&](Normed& own) { fully_shard(own, mesh); }).empty());
  });
}

TEST(BadInput, SparseGradientsAreRefused) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    struct Table : nn::Module<Table> {
      nn::Child<nn::Hooked<torch::nn::Embedding>> rows{
          *this, "rows", torch::nn::EmbeddingOptions(4, 3).sparse(true)};
      nn::Child<nn::Linear> linear{*this, "linear", 3, 3};
    } table;
    EXPECT_ERROR(fully_shard(table, mesh), "parameter 'rows.weight'", "Embedding",
                 "gets sparse gradients", "sparse(true)");
    EXPECT_ERROR(replicate(table, mesh), "gets sparse gradients");
    EXPECT_ERROR(apply_plan(table, mesh, plan_units(table, wrap_named("linear"))),
                 "parameter 'rows.weight'", "gets sparse gradients");
    EXPECT_FALSE(is_fully_sharded(*table.linear));
    fully_shard(table, mesh, {.ignored = {table.rows->slot("weight")}});
  });
}

}  // namespace
}  // namespace tessera::fsdp
