// Tests replicated parameters whose gradients are not reduced between ranks. If the ranks' copies
// of a parameter differ, the first step, the first clipping and every save throw.

#include "checkpoint/known_model.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/agreement.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/initialization.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/environment.h"

namespace tessera::checkpoint {
namespace {

struct Mlp : nn::Module<Mlp> {
  at::Tensor forward(const at::Tensor& x) { return (*down)((*up)(x).relu()); }
  nn::Child<nn::Linear> up{*this, "up", 6, 8};
  nn::Child<nn::Linear> down{*this, "down", 8, 6};
};

struct WithStatistics : Mlp {
  nn::Parameter statistics = register_buffer_slot("statistics", {3});
};

void plan(Mlp& model, const DeviceMesh& mesh) {
  tensor_parallel::parallelize_module(
      model, mesh,
      {{"up", tensor_parallel::colwise_parallel()}, {"down", tensor_parallel::rowwise_parallel()}});
}

/// A way to distribute a model, and the mesh dimensions over which the batch is split.
struct Program {
  std::string name;
  std::function<void(Mlp&, const DeviceMesh&)> apply;
  std::vector<std::string> batch_dims;
  std::vector<std::string_view> error;  ///< texts of the expected error message; empty: no error
};

std::vector<Program> programs() {
  using fsdp::fully_shard;
  const auto plan_tp = [](Mlp& m, const DeviceMesh& mesh) { plan(m, mesh["tp"]); };
  const auto shard_dp = [](Mlp& m, const DeviceMesh& mesh) { fully_shard(m, mesh["dp"]); };
  const auto shard_all = [](Mlp& m, const DeviceMesh& mesh) { fully_shard(m, mesh.flatten()); };
  const auto both = [=](Mlp& m, const DeviceMesh& mesh) {
    plan_tp(m, mesh);
    shard_dp(m, mesh);
  };
  const auto unflattened = [=](Mlp& m, const DeviceMesh& mesh) {
    const DeviceMesh three = mesh.unflatten("dp", {1, 2}, {"rep", "shard"});
    plan(m, three["tp"]);
    fully_shard(m, three[{"rep", "shard"}]);
  };
  const auto shard_up = [](Mlp& m, const DeviceMesh& mesh) { fully_shard(*m.up, mesh.flatten()); };
  const std::vector<std::string_view> no_fsdp{"up.weight", "ranks 0 and 2", "along dp",
                                              "fsdp::fully_shard", "[dp]"};
  const std::vector<std::string_view> no_plan{"up.weight", "ranks 0 and 1", "along tp",
                                              "parallelize_module", "[tp]"};
  return {{"both", both, {"dp"}, {}},
          {"only a plan, one batch", plan_tp, {}, {}},
          {"only FSDP, one batch in tp", shard_dp, {"dp"}, {}},
          {"FSDP over all ranks", shard_all, {"dp", "tp"}, {}},
          {"replicas and shards of an unflattened dimension", unflattened, {"dp"}, {}},
          {"FSDP forgotten", plan_tp, {"dp"}, no_fsdp},
          {"plan forgotten", shard_dp, {"dp", "tp"}, no_plan},
          {"a module forgotten", shard_up, {"dp", "tp"}, {"down.weight", "fully_shard"}}};
}

at::Tensor batch_of(const DeviceMesh& mesh, const std::vector<std::string>& dims) {
  const at::Tensor all = at::sin(at::arange(24, at::kFloat)).view({4, 6});
  if (dims.empty()) {
    return all;
  }
  const DeviceMesh split = dims.size() == 1 ? mesh[dims[0]] : mesh.flatten();
  const std::int64_t rows = 4 / split.size();
  return all.narrow(0, rows * split.local_rank(), rows);
}

using Use = std::function<void(Rank&, Mlp&, optim::Optimizer&, const DeviceMesh&)>;

/// Runs forward, backward and `use` on the model of each Program. Expects the error Program::error.
void expect_of_programs(const Use& use) {
  for (const Program& program : programs()) {
    SCOPED_TRACE(program.name);
    const auto errors = ErrorsOfRanks(4, [&](Rank& rank) {
      const DeviceMesh mesh = rank.mesh({2, 2}, {"dp", "tp"});
      Mlp model;
      program.apply(model, mesh);
      nn::init_weights(model, 3);
      optim::Sgd optimizer(model, {.lr = 0.1});
      model(batch_of(mesh, program.batch_dims)).square().mean().backward();
      use(rank, model, optimizer, mesh);
    });
    for (const std::string& error : errors) {
      EXPECT_EQ(error.empty(), program.error.empty()) << error;
      EXPECT_TRUE(testing::Contains(error, program.error));
    }
  }
}

TEST(ReplicatedParameters, AreComparedByTheFirstStep) {
  expect_of_programs([](Rank&, Mlp&, optim::Optimizer& optimizer, const DeviceMesh&) {
    optimizer.step();
    optimizer.step();
  });
}

TEST(ReplicatedParameters, AreComparedByTheFirstClipping) {
  expect_of_programs([](Rank&, Mlp&, optim::Optimizer& optimizer, const DeviceMesh&) {
    optim::clip_grad_norm_(optimizer.parameters(), 1.0);
  });
}

TEST(ReplicatedParameters, AreComparedByEverySave) {
  expect_of_programs([](Rank& rank, Mlp& model, optim::Optimizer& optimizer, const DeviceMesh&) {
    const at::NoGradGuard no_grad;
    for (const nn::SlotPtr& slot : optimizer.parameters()) {
      const at::Tensor local = local_tensor(slot->persistent()).detach();
      local.sub_(local_tensor(slot->persistent().grad()), 0.1);
    }
    static const TemporaryFolder dir;
    static std::int64_t step = 0;
    step += rank.rank() == 0 ? 1 : 0;
    comm::gather_values(*rank.world()->group({0, 1, 2, 3}, "all"), at::kCPU, {0});
    save(*rank.world(), dir.path(), step, {model});
  });
}

// In the first step, all gradients are zero and therefore equal on all ranks. With TESSERA_DEBUG=1,
// ranks compare the gradients of the second step as well.
TEST(ReplicatedParameters, AreComparedByEachStepInDebugMode) {
  const testing::DebugChecks debug("1");
  const auto errors = ErrorsOfRanks(2, [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2, 1}, {"dp", "tp"});
    Mlp model;
    plan(model, mesh["tp"]);
    nn::init_weights(model, 3);
    optim::Sgd optimizer(model, {.lr = 0.1});
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      (model(batch_of(mesh, {"dp"})).square().mean() * step).backward();
      optimizer.step();
    }
  });
  EXPECT_CONTAINS(errors, "along dp");
}

// Values that may differ between ranks without an error: buffers, frozen parameters, parameters
// that are declared distinct, and parameters that other FSDP roots manage.
TEST(DistinctAndFrozenParameters, MayDifferBetweenRanks) {
  const TemporaryFolder dir;
  RunRanks(4, [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2, 2}, {"dp", "ep"});
    Mlp model;
    nn::init_weights(model, 3);
    fsdp::fully_shard(*model.up, mesh["dp"]);
    fsdp::fully_shard(*model.down, mesh.flatten());
    for (const auto& [name, slot] : model.up->named_slots()) {
      slot->set_distinct_along(mesh["ep"]);
    }
    optim::AdamW optimizer(model, {.lr = 0.1});
    const at::Tensor x = batch_of(mesh, {"dp", "tp"});
    model(x).square().mean().backward();
    EXPECT_NO_THROW(optim::clip_grad_norm_(optimizer.parameters(), 1.0));
    EXPECT_NO_THROW(optimizer.step());
  });
  RunRanks(2, [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2}, {"dp"});
    WithStatistics model;
    model.statistics.slot()->set(at::full({3}, rank.rank()));
    model.statistics.slot()->set_initialized(true);
    nn::init_weights(model, 3);
    model.down->slot("weight")->persistent().set_requires_grad(false);
    fsdp::fully_shard(model, mesh);
    EXPECT_NO_THROW(save(*rank.world(), dir.path(), 1, {model}));
  });
}

// The AdamW step count of an expert differs between ranks if a rank has no rows for the expert.
TEST(StepCounts, AreComparedBySave) {
  const TemporaryFolder dir;
  const auto errors = ErrorsOfRanks(4, [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2, 2}, {"dp", "tp"});
    Mlp model;
    nn::init_weights(model, 3);
    fsdp::fully_shard(model, mesh.flatten());
    optim::AdamW optimizer(model, {});
    auto state = optim::named_state(optimizer, model);
    for (auto& [name, tensor] : state) {
      if (name == "down.bias.step") {
        tensor.fill_(rank.rank() == 2 ? 4 : 5);
      }
    }
    save(*rank.world(), dir.path(), 1, {model, state});
  });
  EXPECT_CONTAINS(errors, "optimizer.state.down.bias.step", "ranks 0 and 2");
  EXPECT_TRUE(dir.files().empty());
}

}  // namespace
}  // namespace tessera::checkpoint
