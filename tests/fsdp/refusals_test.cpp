// Tests wrong calls, and parameters that belong to no unit. An error must name the cause, before
// anything is sent or changed.

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>

#include <cmath>

#include "fsdp/training/training.h"
#include "tessera/nn/hooked.h"

namespace tessera::fsdp::refusals {

struct Call {
  Rank& rank;
  SmallModel& model;
  const DeviceMesh& mesh;
};

struct BadCall {
  const char* name;
  std::vector<std::string_view> words;
  std::function<void(Call)> act;
};

TEST(BadCall, ReportsTheCauseAndChangesNothing) {
  const auto options = [](const Options& options) {
    return [options](Call c) { fully_shard(*c.model.blocks[0], c.mesh, options); };
  };
  const auto divides_by = [](double factor) {
    return [factor](Call c) {
      fully_shard(*c.model.head, c.mesh);
      set_gradient_divide_factor(c.model, factor);
    };
  };
  nn::Linear no_unit(2, 2);
  const std::vector<BadCall> calls{
      {"no mesh", {"fully_shard", "undefined"}, [](Call c) { fully_shard(c.model, DeviceMesh()); }},
      {"no world", {"world is null"}, [](Call) { world_mesh(nullptr); }},
      {"mesh of no ranks", {"0"}, [](Call c) { fully_shard(c.model, c.rank.mesh({0}, {"dp"})); }},
      {"unknown dimension", {"pd", "dp"}, [](Call c) { fully_shard(c.model, c.mesh["pd"]); }},
      {"unnamed dimensions",
       {"name"},
       [](Call c) { fully_shard(c.model, c.rank.mesh({1, 2}, {})); }},
      {"three dimensions",
       {"fully_shard", "(a=1, b=2, c=1)"},
       [](Call c) { fully_shard(c.model, c.rank.mesh({1, 2, 1}, {"a", "b", "c"})); }},
      {"two dimensions to replicate over",
       {"replicate", "(a=2, b=1)", "mesh.flatten()"},
       [](Call c) { replicate(c.model, c.rank.mesh({2, 1}, {"a", "b"})); }},
      {"no mesh to replicate over",
       {"replicate", "undefined"},
       [](Call c) { replicate(c.model, DeviceMesh()); }},
      {"split replicas",
       {"split parameters"},
       [](Call c) { replicate(c.model, c.mesh, {.post_forward_mesh_size = 2}); }},
      {"no bucket",
       {"bucket_cap_mb = 0"},
       [](Call c) { replicate(c.model, c.mesh, {.bucket_cap_mb = 0}); }},
      {"post-forward mesh", {"post_forward_mesh_size = 3"}, options({.post_forward_mesh_size = 3})},
      {"computation in integers",
       {"mp_policy", "Int"},
       options({.mp_policy = {.param_dtype = at::kInt}})},
      {"reduction in integers",
       {"mp_policy", "Int"},
       options({.mp_policy = {.reduce_dtype = at::kInt}})},
      {"dimension that a bias lacks",
       {"Shard(1)", "'up.bias'", "[6]"},
       options(
           {.shard_placement = [](auto&, auto&) { return std::optional<Placement>(Shard{1}); }})},
      {"divide by 0", {"must be positive and finite"}, divides_by(0)},
      {"divide by -2", {"must be positive and finite"}, divides_by(-2)},
      {"divide by infinity", {"must be positive and finite"}, divides_by(HUGE_VAL)},
      {"divide by NaN", {"must be positive and finite"}, divides_by(std::nan(""))},
      {"prefetch of no unit",
       {"not an FSDP unit"},
       [](Call c) {
         fully_shard(*c.model.head, c.mesh);
         set_forward_prefetch(*c.model.head, {c.model.blocks[0].get()});
       }},
      {"prefetch of no module",
       {"set_backward_prefetch", "null"},
       [](Call c) {
         fully_shard(*c.model.head, c.mesh);
         set_backward_prefetch(*c.model.head, {nullptr});
       }},
      {"hook of no unit",
       {"set_all_reduce_hook"},
       [&](Call) { set_all_reduce_hook(no_unit, [](const at::Tensor&) {}); }},
      {"event of no unit",
       {"set_post_optim_event"},
       [&](Call) { set_post_optim_event(no_unit, nullptr); }},
      {"reshard of no unit",
       {"set_reshard_after_forward"},
       [&](Call) { set_reshard_after_forward(no_unit, true); }},
      {"unshard of no unit", {"unshard"}, [&](Call) { unshard(no_unit); }},
      {"second call",
       {"apply one of them once"},
       [](Call c) {
         fully_shard(*c.model.head, c.mesh);
         fully_shard(*c.model.head, c.mesh);
       }},
      {"sharding of replicas",
       {"apply one of them once"},
       [](Call c) {
         replicate(*c.model.head, c.mesh);
         EXPECT_ERROR(replicate(*c.model.head, c.mesh), "apply one of them once");
         fully_shard(*c.model.head, c.mesh);
       }},
      {"unit below another",
       {"'weight'", "inner modules"},
       [](Call c) { shard_units({&*c.model.blocks[1], &*c.model.blocks[1]->up}, c.mesh); }},
      {"module without forward",
       {"fully_shard", "ModuleList"},
       [](Call c) {
         nn::ModuleList list;
         list.push_back(std::make_shared<nn::Linear>(2, 2));
         EXPECT_ERROR(replicate(list, c.mesh), "replicate was applied to a ModuleList");
         fully_shard(list, c.mesh);
       }},
      {"parameter shared with another unit", {"'up.weight'", "tessera::nn::Linear"}, [](Call c) {
         c.model.blocks[0]->up->tie_slot("weight", c.model.blocks[1]->up->slot("weight"));
         fully_shard(*c.model.blocks[0], c.mesh);
       }}};
  for (const BadCall& call : calls) {
    SCOPED_TRACE(call.name);
    RunRanks(2, [&](Rank& rank) {
      Filled<SmallModel> model(4, 6, 2, 2);
      const DeviceMesh mesh = rank.mesh({2}, {"dp"});
      EXPECT_TRUE(testing::Throws<Error>([&] { call.act({rank, model, mesh}); }, call.words));
      EXPECT_TRUE(rank.world()->traffic().table().empty());
      for (const auto& [name, slot] : model.blocks[0]->named_slots()) {
        EXPECT_FALSE(tessera::is_distributed(slot->get())) << name;
      }
    });
  }
}

TEST_ON_RANKS(FullyShard, RefusesAParameterOnAMeshOfAnotherRoot, 2) {
  nn::Linear linear(2, 2);
  const at::Tensor weight =
      distribute_tensor(linear.weight->detach(), rank.mesh({2}, {"tp"}), {Shard{0}}).tensor();
  linear.slot("weight")->set(weight.detach().requires_grad_());
  EXPECT_ERROR(fully_shard(linear, rank.mesh({2}, {"dp"})), "'weight'");
  EXPECT_FALSE(tessera::is_distributed(linear.bias));
}

TEST_SHARDED(PostOptimEvent, MayBeSetOnTheRootOnly, 2) {
  local_loss(model, rank).backward();
  EXPECT_ERROR(set_post_optim_event(*model.blocks[0], nullptr), "is not the root");
}

// The flattened mesh "all" contains "ep", over which the experts are already sharded.
TEST_ON_MESH(Experts, OnADimensionOfTheFlattenedMeshAreRefused, {2, 2}, {"dp", "ep"}) {
  Filled<SmallModel> model(kDim, kHidden, kClasses);
  nn::distribute_parameter(*model.blocks[1]->up->slot("weight"), mesh["ep"], {Shard{0}});
  const at::Tensor before = model.head->slot("weight")->get();
  EXPECT_ERROR(fully_shard(model, mesh.flatten("all")), "'block1.up.weight'", "SmallModel",
               "(ep=2)", "(all=4)", "Options::parameter_mesh");
  EXPECT_TRUE(model.head->slot("weight")->get().is_same(before));
  const auto rest = [mesh](const std::string& name, const at::Tensor&) {
    return name == "block1.up.weight" ? std::optional(mesh["dp"]) : std::nullopt;
  };
  fully_shard(model, mesh.flatten("all"), {.parameter_mesh = rest});
}

TEST_ON_MESH(SparseGradients, AreRefused, {2}, {"dp"}) {
  struct Table : nn::Module<Table> {
    nn::Child<nn::Hooked<torch::nn::Embedding>> rows{
        *this, "rows", torch::nn::EmbeddingOptions(4, 3).sparse(true)};
    nn::Child<nn::Linear> linear{*this, "linear", 3, 3};
  } table;
  EXPECT_ERROR(fully_shard(table, mesh), "parameter 'rows.weight'", "Embedding",
               "gets sparse gradients", "sparse(true)");
  EXPECT_ERROR(replicate(table, mesh), "gets sparse gradients");
  fully_shard(table, mesh, {.ignored = {table.rows->slot("weight")}});
}

struct Normed : nn::Module<Normed> {
  nn::Child<nn::Hooked<torch::nn::BatchNorm1d>> norm{*this, "norm", 4};
};

TEST(BatchNorm, OverLocalRowsCausesOneWarning) {
  using Way = std::function<void(Normed&, const DeviceMesh&)>;
  const Way shard_all = [](Normed& model, const DeviceMesh& mesh) { fully_shard(model, mesh); };
  const Way replicate_all = [](Normed& model, const DeviceMesh& mesh) { replicate(model, mesh); };
  const Way itself = [](Normed& model, const DeviceMesh& mesh) { fully_shard(*model.norm, mesh); };
  const auto warnings_of = [](const Way& way, const DeviceMesh& mesh, bool training = true) {
    const Warnings warnings("BatchNorm");
    Normed model;
    model.norm->train(training);
    way(model, mesh);
    return warnings.messages();
  };
  RunOnMesh({1}, {"dp"}, [&](const DeviceMesh& mesh) {
    for (const Way& way : {shard_all, replicate_all}) {
      EXPECT_TRUE(warnings_of(way, mesh).empty());
    }
  });
  RunOnMesh({2}, {"dp"}, [&](const DeviceMesh& mesh) {
    EXPECT_TRUE(warnings_of(shard_all, mesh, /*training=*/false).empty());
    for (const Way& way : {shard_all, replicate_all}) {
      const std::vector<std::string> found = warnings_of(way, mesh);
      ASSERT_EQ(found.size(), 1);
      EXPECT_CONTAINS(found[0], "'norm'", "LayerNorm");
    }
    const std::vector<std::string> found = warnings_of(itself, mesh);
    ASSERT_EQ(found.size(), 1);
    EXPECT_CONTAINS(found[0], "the unit itself");
  });
}

void shard_blocks(SmallModel& model, const DeviceMesh& mesh) {
  for (const auto& block : model.blocks) {
    fully_shard(*block, mesh);
  }
}

TEST_ON_MESH(ParametersOutsideOfUnits, MayBeFrozenIgnoredOrReplicated, {2, 1}, {"dp", "one"}) {
  const std::vector<at::Tensor> expected = gradients_alone();
  Filled<SmallModel> frozen(kDim, kHidden, kClasses), ignored(kDim, kHidden, kClasses);
  Filled<SmallModel> alone(kDim, kHidden, kClasses), whole(kDim, kHidden, kClasses);
  shard_blocks(frozen, mesh["dp"]);
  Options left;
  for (const auto& [name, slot] : ignored.head->slots()) {
    frozen.head->slot(name)->get().set_requires_grad(false);
    left.ignored.insert(slot);
  }
  local_loss(frozen, rank).backward();
  shard_blocks(alone, mesh["one"]);
  local_loss(alone, rank).backward();
  fully_shard(*ignored.blocks[0], mesh["dp"], left);
  shard_units({&*ignored.blocks[1], &*ignored.blocks[2]}, mesh["dp"]);
  local_loss(ignored, rank).backward();
  EXPECT_FALSE(tessera::is_distributed(ignored.head->weight->grad()));
  shard_blocks(whole, mesh["dp"]);
  replicate(whole, mesh["dp"]);
  local_loss(whole, rank).backward();
  expect_gradients(whole, expected);
}

/// A model whose module `extra` is added, replaced or unfrozen after fully_shard().
struct Growing : nn::Module<Growing> {
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = (*a)(x);
    return (extra != nullptr ? (*extra)(y) : y).square().mean();
  }
  void grow() {
    extra = register_module("extra", std::make_shared<nn::Linear>(4, 4));
    testing::fill(*extra);
  }
  void replace() {
    extra = replace_module("extra", std::make_shared<nn::Linear>(4, 4));
    testing::fill(*extra);
  }
  void freeze(bool frozen) {
    for (const auto& [name, slot] : extra->slots()) {
      slot->get().set_requires_grad(!frozen);
    }
  }
  nn::Child<nn::Linear> a{*this, "a", 4, 4};
  std::shared_ptr<nn::Linear> extra;
};

// A parameter that belongs to no unit must cause an error: each rank would train a different copy.
TEST(ParametersOutsideOfUnits, AreRefused) {
  struct Change {
    const char* name;
    bool has_extra;
    bool shards_root;
    bool frozen;
    void (*act)(Growing&);
  };
  const Change changes[] = {
      {"a new module in a unit", false, true, false, [](Growing& m) { m.grow(); }},
      {"a new module outside", false, false, false, [](Growing& m) { m.grow(); }},
      {"a replacement", true, true, false, [](Growing& m) { m.replace(); }},
      {"an unfrozen module", true, false, true, [](Growing& m) { m.freeze(false); }}};
  const auto run = [](const Change& change, bool trains_before, const DeviceMesh& mesh) {
    Growing model;
    if (change.has_extra) {
      model.grow();
      model.freeze(change.frozen);
    }
    testing::fill(model);
    fully_shard(*model.a, mesh);
    if (change.shards_root) {
      fully_shard(model, mesh);
    }
    const at::Tensor x = uniform_values({2, 4}, 1);
    if (trains_before) {
      model(x).backward();
    }
    change.act(model);
    {
      const c10::AutoGradMode no_grad(false);
      model(x);
    }
    if (mesh.size() > 1) {
      for (int again = 0; again < 2; ++again) {
        EXPECT_ERROR(model(x), "'extra.weight'", std::to_string(mesh.size()) + " ranks",
                     "fully_shard", "Options::ignored");
      }
      model.freeze(true);
    }
    model(x).backward();
  };
  for (const Change& change : changes) {
    SCOPED_TRACE(change.name);
    for (const int ranks : {1, 2, 4}) {
      RunOnMesh({ranks}, {"dp"}, [&](const DeviceMesh& mesh) {
        run(change, false, mesh);
        run(change, true, mesh);
      });
    }
  }
}

}  // namespace tessera::fsdp::refusals
