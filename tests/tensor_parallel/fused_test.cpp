// Fused weights: nn::FusedLinear, fused_colwise_parallel, and FSDP of what it has split. The oracle
// is one rank, or the separate products.

#include "tessera/dtensor/communication_scope.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/fused_linear.h"
#include "tessera/nn/linear.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::tensor_parallel {
namespace {

using nn::FusedLinear;
using testing::fill;
using testing::Filled;
using testing::full_tensor;
using testing::uniform_values;

/// The rows of part `wanted` in a weight whose parts lie in groups.
std::vector<std::int64_t> rows_of_part(const FusedLinear& fused, std::size_t wanted) {
  std::vector<std::int64_t> rows;
  std::int64_t row = 0;
  for (std::int64_t group = 0; group < fused.groups(); ++group) {
    for (std::size_t part = 0; part < fused.parts().size(); ++part) {
      for (std::int64_t i = 0; i < fused.parts()[part].out_features / fused.groups(); ++i, ++row) {
        if (part == wanted) {
          rows.push_back(row);
        }
      }
    }
  }
  return rows;
}

/// What the parts would be as separate Linears.
std::vector<at::Tensor> separate_products(const FusedLinear& fused, const at::Tensor& x) {
  std::vector<at::Tensor> products;
  for (std::size_t part = 0; part < fused.parts().size(); ++part) {
    const at::Tensor rows = at::tensor(rows_of_part(fused, part), at::kLong);
    products.push_back(
        at::linear(x, fused.weight->index_select(0, rows), fused.bias->index_select(0, rows)));
  }
  return products;
}

std::vector<nn::FusedPart> query_key_value(std::int64_t query, std::int64_t key_value) {
  return {{"q_proj", query}, {"k_proj", key_value}, {"v_proj", key_value}};
}

TEST(FusedLinear, IsItsPartsInOneProduct) {
  const at::Tensor x = uniform_values({2, 3, 5}, 0.5);
  for (const std::int64_t groups : {1, 2, 4}) {
    Filled<FusedLinear> fused(5, query_key_value(16, 4), {.groups = groups});
    const std::vector<at::Tensor> parts = fused.split(fused(x));
    const std::vector<at::Tensor> expected = separate_products(fused, x);
    ASSERT_EQ(parts.size(), 3U);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      EXPECT_TRUE(parts[i].allclose(expected[i], 1e-5, 1e-6)) << groups << " groups, part " << i;
    }
  }
}

TEST(FusedLinear, RefusesGroupsThatDoNotDivide) {
  EXPECT_ERROR(FusedLinear(5, query_key_value(16, 6), {.groups = 4}), "'k_proj'", "6 features",
               "4 equal groups");
  EXPECT_ERROR(FusedLinear(5, {}), "without parts");
  FusedLinear fused(5, query_key_value(16, 4));
  EXPECT_ERROR(fused.split(uniform_values({2, 12}, 0.5)), "12 of 24 features are not known");
}

TEST(FusedColwise, GivesEachRankAShareOfEveryPart) {
  const at::Tensor x = uniform_values({4, 5}, 0.5);
  Filled<nn::Linear> alone(5, 21);
  const std::vector<at::Tensor> whole = alone(x).detach().chunk(3, -1);  // parts of 7
  for (const int ranks : {2, 3, 4}) {
    RunRanks(ranks, [&](Rank& rank) {
      Filled<nn::Linear> linear(5, 21);
      parallelize_module(linear, rank.mesh({ranks}, {"tp"}),
                         {{"", fused_colwise_parallel({.parts = 3})}});
      const std::vector<at::Tensor> parts = linear(x).chunk(3, -1);
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_TRUE(local_tensor(parts[i]).allclose(
            whole[i].chunk(ranks, -1)[static_cast<std::size_t>(rank.rank())], 1e-5, 1e-6));
      }
    });
  }
}

TEST(FusedColwise, SharesOutGroupsOfUnequalParts) {
  const at::Tensor x = uniform_values({4, 5}, 0.5);
  Filled<FusedLinear> alone(5, query_key_value(16, 4), {.groups = 4});
  const std::vector<at::Tensor> whole = alone.split(alone(x).detach());
  RunRanks(2, [&](Rank& rank) {
    Filled<FusedLinear> fused(5, query_key_value(16, 4), {.groups = 4});
    parallelize_module(fused, rank.mesh({2}, {"tp"}), {{"", fused_colwise_parallel()}});
    const std::vector<at::Tensor> parts = fused.split(fused(x));
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(local_tensor(parts[i]).allclose(
          whole[i].chunk(2, -1)[static_cast<std::size_t>(rank.rank())], 1e-5, 1e-6));
    }
  });
}

TEST(FusedColwise, RefusesWhatItCannotSplit) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    const auto apply = [&](nn::ModuleBase& module, const StylePtr& style) {
      parallelize_module(module, mesh, {{"", style}});
    };
    nn::Linear linear(5, 20);
    EXPECT_ERROR(apply(linear, fused_colwise_parallel()), "20 output features", "0 equal parts",
                 "parts = 3");
    EXPECT_ERROR(apply(linear, fused_colwise_parallel({.parts = 3})), "3 equal parts");
    FusedLinear unequal(5, query_key_value(16, 4));
    EXPECT_ERROR(apply(unequal, fused_colwise_parallel()), "'q_proj' and 'k_proj'", "16 and 4",
                 "groups = the number of key and value heads");
    EXPECT_ERROR(apply(unequal, fused_colwise_parallel({.parts = 3})), "leave out parts = 3");
    EXPECT_ERROR(apply(unequal, colwise_parallel()), "use fused_colwise_parallel()");
    FusedLinear groups(5, query_key_value(9, 3), {.groups = 3});
    EXPECT_ERROR(apply(groups, fused_colwise_parallel()), "3 groups", "2 ranks");
    EXPECT_FALSE(tessera::is_distributed(*groups.weight));
  });
}

/// Gate and up in one product.
class Mlp : public nn::Module<Mlp> {
 public:
  Mlp(std::int64_t dim, std::int64_t hidden) {
    gate_up = register_module(
        "gate_up", std::make_shared<FusedLinear>(
                       dim, std::vector<nn::FusedPart>{{"gate", hidden}, {"up", hidden}}));
    down = register_module("down", std::make_shared<nn::Linear>(hidden, dim));
  }
  at::Tensor forward(const at::Tensor& x) {
    const std::vector<at::Tensor> parts = gate_up->split((*gate_up)(x));
    return (*down)(at::silu(parts[0]) * parts[1]);
  }
  std::shared_ptr<FusedLinear> gate_up;
  std::shared_ptr<nn::Linear> down;
};

constexpr std::int64_t kRows = 4;

/// Two steps of gradient descent on this rank's rows of the batch; the values afterwards.
at::Tensor train(Mlp& model, std::int64_t part, std::int64_t parts) {
  for (int step = 0; step < 2; ++step) {
    const at::Tensor batch = uniform_values({kRows, 5}, 0.1 + step);
    model(batch.chunk(parts)[static_cast<std::size_t>(part)]).square().mean().backward();
    const c10::NoGradGuard no_grad;
    for (const auto& [name, slot] : model.named_slots()) {
      slot->persistent().sub_(slot->persistent().grad(), 0.5);
      slot->persistent().mutable_grad().reset();
    }
  }
  return testing::parameter_values(model);
}

struct Shape {
  std::int64_t hidden, dp, tp;
  bool local;
};

class FusedUnderFsdp : public ::testing::TestWithParam<Shape> {};

TEST_P(FusedUnderFsdp, TrainsAsOneRank) {
  const Shape& shape = GetParam();
  Filled<Mlp> alone(5, shape.hidden);
  const at::Tensor expected = train(alone, 0, 1);
  RunRanks(static_cast<int>(shape.dp * shape.tp), [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({shape.dp, shape.tp}, {"dp", "tp"});
    Filled<Mlp> model(5, shape.hidden);
    parallelize_module(model, mesh["tp"],
                       {{"gate_up", fused_colwise_parallel({.use_local_output = shape.local})},
                        {"down", rowwise_parallel({.input_layouts = Shard{-1}})}});
    fsdp::fully_shard(model, mesh["dp"]);
    const at::Tensor values = train(model, mesh.local_rank(0), shape.dp);
    EXPECT_TRUE(values.allclose(expected, 1e-4, 1e-5));
  });
}

INSTANTIATE_TEST_SUITE_P(, FusedUnderFsdp,
                         ::testing::Values(Shape{8, 2, 2, true}, Shape{7, 2, 2, true},
                                           Shape{8, 2, 2, false}, Shape{7, 4, 1, true}),
                         [](const auto& info) { return "Case" + std::to_string(info.index); });

TEST(FusedWeight, UnderFsdpIsShardedInEveryPart) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    Filled<FusedLinear> fused(5, {{"gate", 6}, {"up", 6}});
    const at::Tensor whole = fused.weight->detach().clone();
    const at::Tensor bias = fused.bias->detach().clone();
    parallelize_module(fused, mesh["tp"], {{"", fused_colwise_parallel()}});
    fsdp::fully_shard(fused, mesh["dp"], {});
    const at::Tensor& shard = fused.weight.slot()->persistent();
    EXPECT_EQ(to_string(*sharding_spec(shard).layout), "[2 x 6:m1,m0 | -]");
    EXPECT_EQ(local_tensor(shard).size(0), mesh.local_rank(0) == 0 ? 4 : 2);
    EXPECT_TRUE(at::equal(full_tensor(shard), whole));
    EXPECT_TRUE(at::equal(full_tensor(fused.bias.slot()->persistent()), bias));
  });
}

/// Counts products of matrices, forward and backward.
class CountingMode final : public OperatorMode {
 public:
  Results call(const Operator& op, const std::function<Results()>& run) override {
    products += op.name == "aten::mm" || op.name == "aten::addmm" ? 1 : 0;
    return run();
  }
  int products = 0;
};

struct Work {
  int products;
  std::int64_t all_reduces;
  friend bool operator==(const Work&, const Work&) = default;
};

/// The work of a forward and backward of `function`, whose input needs a gradient.
template <class Function>
Work work_of(const DeviceMesh& mesh, const Function& function) {
  CountingMode mode;
  const CommunicationScope communication(mesh);
  {
    const OperatorModeScope scope(mode);
    function(uniform_values({4, 5}, 0.5).requires_grad_()).backward();
  }
  return {mode.products, communication.total().calls};
}

// What fusing is for: a third of the products, and of the gradients of the input to be summed.
TEST(FusedColwise, MakesOneProductOfThree) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    Filled<FusedLinear> fused(5, query_key_value(8, 8), {.bias = false});
    parallelize_module(fused, mesh, {{"", fused_colwise_parallel()}});
    std::vector<std::unique_ptr<nn::Linear>> separate;
    for (int i = 0; i < 3; ++i) {
      separate.push_back(std::make_unique<nn::Linear>(5, 8, nn::LinearOptions{.bias = false}));
      fill(*separate.back());
      parallelize_module(*separate.back(), mesh, {{"", colwise_parallel()}});
    }
    const Work one = work_of(mesh, [&](const at::Tensor& x) {
      const std::vector<at::Tensor> parts = fused.split(fused(x));
      return (parts[0] * parts[1] * parts[2]).sum();
    });
    const Work three = work_of(mesh, [&](const at::Tensor& x) {
      return ((*separate[0])(x) * (*separate[1])(x) * (*separate[2])(x)).sum();
    });
    EXPECT_EQ(one, (Work{3, 1}));
    EXPECT_EQ(three, (Work{9, 3}));
  });
}

// The parts of a distributed result, and their gradients, are where the result is.
TEST(FusedColwise, ADistributedResultIsSplitWithoutCommunication) {
  const at::Tensor values = uniform_values({4, 21}, 0.3);
  RunOnMesh({2}, {"tp"}, [&](const DeviceMesh& mesh) {
    const StrictScope strict;
    for (const bool with_sizes : {false, true}) {
      at::Tensor x = distribute_tensor(values, mesh, {StridedShard{1, 3}}).tensor().detach();
      x.requires_grad_();
      const CommunicationScope communication(mesh);
      const std::vector<at::Tensor> parts =
          with_sizes ? x.split_with_sizes({7, 7, 7}, -1) : x.chunk(3, -1);
      ASSERT_EQ(parts.size(), 3U);
      EXPECT_EQ(DistributedTensor(parts[1]).placements(), Placements{Shard{1}});
      (parts[0] * parts[1] + parts[2]).square().sum().backward();
      EXPECT_EQ(communication.total().calls, 0);
      EXPECT_EQ(DistributedTensor(x.grad()).placements(), (Placements{StridedShard{1, 3}}));
      at::Tensor plain = values.clone().requires_grad_();
      const std::vector<at::Tensor> whole = plain.chunk(3, -1);
      (whole[0] * whole[1] + whole[2]).square().sum().backward();
      EXPECT_TRUE(full_tensor(parts[2]).allclose(whole[2]));
      EXPECT_TRUE(full_tensor(x.grad()).allclose(plain.grad(), 1e-5, 1e-6));
    }
  });
}

}  // namespace
}  // namespace tessera::tensor_parallel
