// Where FSDP meets tensor parallelism, experts, hooks and modules that change: groups of one rank,
// parameters outside of units, parts of a tensor without a gradient, and units called twice.

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tanh.h>

#include "fsdp/training/training.h"
#include "tessera/core/layout_math.h"
#include "tessera/fsdp/forward_method.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/optimizer.h"
#include "tessera/tensor_parallel/parallelize.h"

namespace tessera::fsdp {
namespace {

namespace tp = tensor_parallel;

// Gradients are summed and divided in reduce_dtype, whatever group has one rank.

struct Scale : nn::Module<Scale> {
  Scale() { w = register_slot("w", at::ones({3})); }
  at::Tensor forward(const at::Tensor& x) { return x * *w; }
  nn::Parameter w;
};

struct ScaleNet : nn::Module<ScaleNet> {
  at::Tensor forward(const at::Tensor& x) { return (*scale)(x).sum(); }
  nn::Child<Scale> scale{*this, "scale"};
};

/// A (replicas, dp, tp) mesh, and how two micro-batches are reduced.
struct ReduceCase {
  std::vector<std::int64_t> sizes;
  bool offload = false;
  bool accumulates_unsharded = false;  ///< the first micro-batch without gradient sync
  bool accumulates_sums = false;       ///< the first micro-batch without all-reduce
  double divisor = 0;                  ///< 0: the default, the number of data ranks
};

class ReduceDtype : public ::testing::TestWithParam<ReduceCase> {};

/// Rank 0's terms are 256 and 256, the others' 1 and 1: bf16 has no 257 and no 513.
TEST_P(ReduceDtype, IsUsedInGroupsOfOneRank) {
  const ReduceCase& c = GetParam();
  const auto ranks = static_cast<int>(c10::multiply_integers(c.sizes));
  RunOnMesh(c.sizes, {"rep", "dp", "tp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    ScaleNet model;
    tp::parallelize_module(model, mesh["tp"],
                           {{"scale", tp::sequence_parallel({.sequence_dim = 0})}});
    Options options{.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
    if (c.offload) {
      options.offload_policy = OffloadPolicy{};
    }
    fully_shard(model, mesh[{"rep", "dp"}], options);
    if (c.divisor != 0) {
      set_gradient_divide_factor(model, c.divisor);
    }
    // Rows are split over tp: one row for each of its ranks.
    const std::int64_t tp_ranks = c.sizes[2];
    at::Tensor x = at::ones({tp_ranks, 3});
    if (rank.rank() < tp_ranks) {
      x[0].fill_(256);
    }
    for (const bool last : {false, true}) {
      set_requires_gradient_sync(model, last || !c.accumulates_unsharded);
      set_requires_all_reduce(model, last || !c.accumulates_sums);
      model(x).backward();
    }
    const double data_ranks = static_cast<double>(ranks) / static_cast<double>(tp_ranks);
    const double sum = 2 * (256 + ranks - 1);
    const at::Tensor gradient = full_tensor(model.scale->w.slot()->persistent().grad());
    EXPECT_EQ(gradient.scalar_type(), at::kFloat);
    EXPECT_TRUE(
        gradient.allclose(at::full({3}, sum / (c.divisor != 0 ? c.divisor : data_ranks)), 1e-6, 0))
        << gradient;
  });
}

INSTANTIATE_TEST_SUITE_P(
    Groups, ReduceDtype,
    ::testing::Values(ReduceCase{{1, 1, 1}, false, false, false, 3}, ReduceCase{{1, 1, 2}},
                      ReduceCase{{1, 1, 4}}, ReduceCase{{1, 2, 2}}, ReduceCase{{2, 1, 2}},
                      ReduceCase{{1, 1, 2}, false, false, false, 3},
                      ReduceCase{{1, 2, 1}, false, false, false, 3}, ReduceCase{{1, 1, 2}, true},
                      ReduceCase{{1, 2, 2}, true}, ReduceCase{{1, 1, 2}, false, true},
                      ReduceCase{{1, 2, 2}, false, true}, ReduceCase{{1, 1, 2}, false, false, true},
                      ReduceCase{{1, 2, 1}, false, false, true},
                      ReduceCase{{2, 1, 1}, false, false, true},
                      ReduceCase{{1, 1, 1}, false, true, false, 3}),
    [](const auto& info) { return "Case" + std::to_string(info.index); });

/// Parameters in bf16: sums of micro-batches would round in `.grad`.
TEST(ReduceDtypeOfReplicas, IsKeptBetweenMicroBatchesAlsoForOneReplica) {
  for (const int ranks : {1, 2}) {
    RunOnMesh({1, ranks}, {"rep", "dp"}, [&](Rank&, const DeviceMesh& mesh) {
      ScaleNet model;
      model.to(at::kBFloat16);
      fully_shard(model, mesh, {.mp_policy = {.reduce_dtype = at::kFloat}});
      set_gradient_divide_factor(model, 256.0 * ranks);
      for (const double value : {256.0, 1.0, 1.0, 254.0}) {
        set_requires_all_reduce(model, value == 254.0);
        model(at::full({1, 3}, value, at::kBFloat16)).backward();
      }
      const at::Tensor gradient = full_tensor(model.scale->w.slot()->persistent().grad());
      EXPECT_TRUE(gradient.equal(at::full({3}, 2, at::kBFloat16))) << gradient;
    });
  }
}

// Parameters that each rank would train alone.

struct Growing : nn::Module<Growing> {
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = (*a)(x);
    return (extra != nullptr ? (*extra)(y) : y).square().mean();
  }
  void grow() { extra = register_module("extra", std::make_shared<nn::Linear>(4, 4)); }
  void replace() { extra = replace_module("extra", std::make_shared<nn::Linear>(4, 4)), fill(); }
  void fill() { testing::fill(*extra); }
  nn::Child<nn::Linear> a{*this, "a", 4, 4};
  std::shared_ptr<nn::Linear> extra;
};

struct Change {
  const char* name;
  bool has_extra;    ///< before fully_shard
  bool shards_root;  ///< else only `a` is a unit
  bool frozen;       ///< extra, before
  std::function<void(Growing&)> act;
};

class ParametersOutsideOfUnits : public ::testing::TestWithParam<Change> {};

TEST_P(ParametersOutsideOfUnits, AreRefusedWheneverTheyAppear) {
  const Change& change = GetParam();
  for (const int ranks : {1, 2, 4}) {
    for (const bool trains_before : {false, true}) {
      RunOnMesh({ranks}, {"dp"}, [&](Rank&, const DeviceMesh& mesh) {
        Growing model;
        if (change.has_extra) {
          model.grow();
          if (change.frozen) {
            for (const auto& [name, slot] : model.extra->slots()) {
              slot->get().set_requires_grad(false);
            }
          }
        }
        testing::fill(model);
        fully_shard(*model.a, mesh);
        if (change.shards_root) {
          fully_shard(model, mesh);
        }
        const at::Tensor x = testing::uniform_values({2, 4}, 1);
        if (trains_before) {
          model(x).backward();
        }
        change.act(model);
        {
          const c10::AutoGradMode no_grad(false);
          model(x);  // an evaluation
        }
        if (ranks == 1) {
          model(x).backward();
          return;
        }
        for (int again = 0; again < 2; ++again) {
          EXPECT_ERROR(model(x), "'extra.weight'", std::to_string(ranks) + " ranks", "fully_shard",
                       "Options::ignored");
        }
        for (const auto& [name, slot] : model.extra->slots()) {
          slot->get().set_requires_grad(false);
        }
        model(x).backward();
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Changes, ParametersOutsideOfUnits,
    ::testing::Values(
        Change{"ModuleInAUnit", false, true, false, [](Growing& m) { m.grow(), m.fill(); }},
        Change{"ModuleOutside", false, false, false, [](Growing& m) { m.grow(), m.fill(); }},
        Change{"Replacement", true, true, false, [](Growing& m) { m.replace(); }},
        Change{"Unfrozen", true, false, true,
               [](Growing& m) { m.extra->slot("weight")->get().set_requires_grad(true); }}),
    [](const auto& info) { return std::string(info.param.name); });

// An expert's shard without a gradient on the ranks whose experts got no rows.

/// Rows of `w` are experts, split over ep.
struct Experts : nn::Module<Experts> {
  explicit Experts(std::int64_t count) { w = register_slot("w", at::ones({count, 3})); }
  at::Tensor forward(const at::Tensor& x, std::int64_t chosen) {
    const at::Tensor own = ep ? DistributedTensor(*w).to_local() : *w;
    const std::int64_t first =
        ep ? chunk_offset(w.slot()->persistent().size(0), ep.size(), ep.local_rank()) : 0;
    at::Tensor sum = x * beside;
    for (std::int64_t i = 0; i < own.size(0); ++i) {
      if (first + i == chosen) {
        sum = sum + (own[i] * x).sum();
      }
    }
    return sum.sum();
  }
  nn::Parameter w;
  DeviceMesh ep;
  at::Tensor beside = at::ones({1}).requires_grad_(true);
};

struct ExpertsCase {
  std::int64_t dp, ep, experts;
};
class ExpertsWithoutRows : public ::testing::TestWithParam<ExpertsCase> {};

TEST_P(ExpertsWithoutRows, AreUpdatedAsOnOneRank) {
  const ExpertsCase& c = GetParam();
  RunOnMesh({c.dp, c.ep}, {"dp", "ep"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Experts model(c.experts), alone(c.experts);
    model.ep = mesh["ep"];
    nn::distribute_parameter(*model.w.slot(), mesh["ep"], {Shard{0}});
    Options options;
    options.parameter_mesh = [&](const std::string&, const at::Tensor&) {
      return std::optional(mesh["dp"]);
    };
    fully_shard(model, mesh.flatten("all"), options);
    optim::AdamW optimizer(model, {.lr = 0.1, .weight_decay = 0.5});
    optim::AdamW optimizer_alone(alone, {.lr = 0.1, .weight_decay = 0.5});
    const at::Tensor x = at::ones({3});
    // All experts, the first alone, none, the last alone.
    for (const int step : {0, 1, 2, 3}) {
      const std::int64_t own = rank.rank() % c.experts;
      const std::int64_t chosen[] = {own, 0, -1, c.experts - 1};
      model(x, chosen[step]).backward();
      for (int other = 0; other < rank.size(); ++other) {
        const std::int64_t theirs[] = {other % c.experts, 0, -1, c.experts - 1};
        // On the mesh, each rank's experts see only that rank's rows.
        const std::int64_t first = chunk_offset(c.experts, c.ep, other % c.ep);
        const std::int64_t rows = chunk_size(c.experts, c.ep, other % c.ep);
        const std::int64_t expert = theirs[step];
        if (expert >= first && expert < first + rows) {
          (alone(x, expert) / rank.size()).backward();
        }
      }
      optimizer.step();
      optimizer_alone.step();
      optimizer.zero_grad();
      optimizer_alone.zero_grad();
    }
    EXPECT_TRUE(full_tensor(model.w.slot()->persistent()).allclose(*alone.w, 1e-5, 1e-6));
    std::map<std::string, at::Tensor> state;
    for (const auto& [name, tensor] : optim::named_state(optimizer, model)) {
      state.emplace(name, tensor);
    }
    EXPECT_EQ(state.at("w.step").item<double>(), 3);  // the third step used none
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, ExpertsWithoutRows,
                         ::testing::Values(ExpertsCase{1, 1, 2}, ExpertsCase{1, 2, 2},
                                           ExpertsCase{1, 2, 3}, ExpertsCase{2, 2, 4},
                                           ExpertsCase{1, 4, 3}),
                         [](const auto& info) { return "Case" + std::to_string(info.index); });

// A unit that is called several times in one forward.

struct Repeated : nn::Module<Repeated> {
  at::Tensor forward(at::Tensor x, int calls) {
    for (int i = 0; i < calls; ++i) {
      x = at::tanh((*inner)(x));
    }
    return x.square().sum();
  }
  nn::Child<nn::Linear> inner{*this, "inner", 5, 5};
};

class RepeatedCalls : public ::testing::TestWithParam<std::tuple<int, int, bool>> {};

TEST_P(RepeatedCalls, CallAParametersHookOnceAndReduceOnce) {
  const auto [ranks, calls, input_needs_gradient] = GetParam();
  const at::Tensor x = testing::uniform_values({6, 5}, 3).requires_grad_(input_needs_gradient);
  Filled<Repeated> alone;
  const auto normalize = [](const at::Tensor& g) { return g / g.norm(); };
  alone.inner->weight.slot()->get().register_hook(normalize);
  for (int i = 0; i < 2; ++i) {
    alone(x, calls).backward();
  }
  RunOnMesh({ranks}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Filled<Repeated> model;
    fully_shard(*model.inner, mesh);
    fully_shard(model, mesh);
    int hooks = 0;
    const at::Tensor weight = model.inner->weight.slot()->persistent();
    weight.register_hook([&](const at::Tensor& g) {
      ++hooks;
      return g / DistributedTensor(g).full_tensor().norm();
    });
    const comm::TrafficTable before = rank.world()->traffic().table();
    for (int i = 0; i < 2; ++i) {
      const at::Tensor loss = model(x.detach().requires_grad_(input_needs_gradient), calls);
      loss.backward(/*gradient=*/{}, /*retain_graph=*/i == 1);
    }
    EXPECT_EQ(hooks, 2);
    const auto reductions =
        traffic_of(rank.world()->traffic().since(before), "dp", "reduce_scatter");
    EXPECT_EQ(reductions.calls, ranks == 1 ? 0 : 2);
    EXPECT_TRUE(full_tensor(weight.grad()).allclose(alone.inner->weight->grad(), 1e-4, 1e-5));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, RepeatedCalls,
                         ::testing::Combine(::testing::Values(1, 2, 4), ::testing::Values(1, 2, 3),
                                            ::testing::Bool()));

TEST(RepeatedUnit, ReducesAtTheEndWhereOneCallGetsNoGradient) {
  const at::Tensor x = testing::uniform_values({6, 5}, 3);
  Filled<Repeated> alone;
  (*alone.inner)(x).sum().backward();
  RunOnMesh({2}, {"dp"}, [&](Rank&, const DeviceMesh& mesh) {
    Filled<Repeated> model;
    fully_shard(*model.inner, mesh);
    fully_shard(model, mesh);
    const at::Tensor unused = model(x, 2);
    (*model.inner)(x).sum().backward();
    EXPECT_TRUE(full_tensor(model.inner->weight.slot()->persistent().grad())
                    .allclose(alone.inner->weight->grad(), 1e-4, 1e-5));
  });
}

// A distributed result that is written into a plain tensor: its gradient is plain and whole.

using Write = std::function<at::Tensor(const at::Tensor& h)>;

struct Written : nn::Module<Written> {
  at::Tensor forward(const at::Tensor& x) {
    return (*down)(at::tanh(write((*up)(x)))).square().mean();
  }
  nn::Child<nn::Linear> up{*this, "up", 8, 10}, down{*this, "down", 10, 8};
  Write write;
};

struct WriteCase {
  const char* name;
  Write write;
};

class WrittenIntoPlain : public ::testing::TestWithParam<WriteCase> {};

TEST_P(WrittenIntoPlain, HasTheGradientsOfOneRank) {
  const at::Tensor x = testing::uniform_values({4, 8}, 1);
  Filled<Written> alone;
  alone.write = GetParam().write;
  for (int i = 0; i < 2; ++i) {
    alone(x).backward();
  }
  using Sizes = std::vector<std::int64_t>;
  for (const Sizes& sizes : {Sizes{1, 1}, Sizes{1, 2}, Sizes{2, 2}, Sizes{1, 4}}) {
    for (const bool accumulates : {false, true}) {
      RunOnMesh(sizes, {"dp", "tp"}, [&](Rank&, const DeviceMesh& mesh) {
        Filled<Written> model;
        model.write = GetParam().write;
        tp::parallelize_module(model, mesh["tp"],
                               {{"up", tp::colwise_parallel()}, {"down", tp::rowwise_parallel()}});
        fully_shard(model, mesh["dp"]);
        for (const bool last : {false, true}) {
          set_requires_gradient_sync(model, last || !accumulates);
          const at::Tensor loss = model(x);
          (tessera::is_distributed(loss) ? DistributedTensor(loss).full_tensor() : loss).backward();
        }
        expect_gradients(model, testing::gradients_of(alone));
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, WrittenIntoPlain,
                         ::testing::Values(WriteCase{"Copy",
                                                     [](const at::Tensor& h) {
                                                       at::Tensor z = at::zeros({4, 10});
                                                       z.copy_(h);
                                                       return z;
                                                     }},
                                           WriteCase{"Rows",
                                                     [](const at::Tensor& h) {
                                                       at::Tensor z = at::zeros({4, 10});
                                                       for (std::int64_t i = 0; i < 4; ++i) {
                                                         z[i] = h[i];
                                                       }
                                                       return z;
                                                     }},
                                           WriteCase{"IndexPut",
                                                     [](const at::Tensor& h) {
                                                       at::Tensor z = at::zeros({4, 10});
                                                       z.index_put_({at::arange(4)}, h);
                                                       return z;
                                                     }}),
                         [](const auto& info) { return std::string(info.param.name); });

// A second method under a plan.

struct TwoMethods : nn::Module<TwoMethods> {
  at::Tensor forward(const at::Tensor& x) { return (*down)(encode(x)); }
  at::Tensor encode(const at::Tensor& x) { return (*up)(x) + at::ones({x.size(0), 10}); }
  nn::Child<nn::Linear> up{*this, "up", 8, 10}, down{*this, "down", 10, 8};
};

TEST(MethodUnderAPlan, RunsInThePlansScope) {
  const at::Tensor x = testing::uniform_values({4, 8}, 1);
  Filled<TwoMethods> alone;
  alone.encode(x).sum().backward();
  for (const bool shards : {false, true}) {
    for (const int ranks : {1, 2, 4}) {
      RunOnMesh({1, ranks}, {"dp", "tp"}, [&](Rank&, const DeviceMesh& mesh) {
        Filled<TwoMethods> model;
        tp::parallelize_module(model, mesh["tp"],
                               {{"up", tp::colwise_parallel()}, {"down", tp::rowwise_parallel()}});
        if (shards) {
          fully_shard(model, mesh["dp"]);
        }
        const at::Tensor code = register_forward_method(model, &TwoMethods::encode)(x);
        EXPECT_TRUE(full_tensor(code).allclose(alone.encode(x), 1e-4, 1e-5));
        (is_distributed(code) ? DistributedTensor(code).full_tensor() : code).sum().backward();
        EXPECT_TRUE(full_tensor(model.up->weight.slot()->persistent().grad())
                        .allclose(alone.up->weight->grad(), 1e-4, 1e-5));
      });
    }
  }
}

TEST(Replicate, NamesFlattenForASliceOfTwoDimensions) {
  RunOnMesh({2, 1}, {"a", "b"}, [](Rank&, const DeviceMesh& mesh) {
    nn::Linear linear(3, 5);
    EXPECT_ERROR(replicate(linear, mesh), "replicate", "mesh.flatten()");
    replicate(linear, mesh.flatten());
  });
}

}  // namespace
}  // namespace tessera::fsdp
