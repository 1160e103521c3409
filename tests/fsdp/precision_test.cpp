// Tests the dtypes of computation and of reduction, the divisor of gradients, averages in the
// reduce-scatter, and models that are converted after fully_shard().

#include <cmath>

#include "fsdp/training/training.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/forwarding_communicator.h"

namespace tessera::fsdp::precision {

/// Returns the gradients of a bf16 copy of the model on one rank.
std::vector<at::Tensor> reference_gradients(const at::Tensor& batch) {
  Filled<SmallModel> compute(5, 7, 3);
  compute.to(at::kBFloat16);
  fsdp::loss_of(compute, batch.to(at::kBFloat16), 0, kRows).backward();
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& gradient : gradients_of(compute)) {
    gradients.push_back(gradient.to(at::kFloat));
  }
  return gradients;
}

TEST(MixedPrecision, ComputesInBfloat16AndKeepsMastersInFp32) {
  const at::Tensor batch = uniform_values({kRows, 5}, 3);
  const std::vector<at::Tensor> expected = reference_gradients(batch);
  for (const int ranks : {1, 2, 3}) {
    RunArranged({"",
                 {ranks},
                 {"dp"},
                 {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}}},
                {5, 7, 3}, [&](Rank& rank, ShardedModel& model) {
                  const std::int64_t rows = kRows / rank.size();
                  const at::Tensor loss = fsdp::loss_of(model, batch, rank.rank() * rows, rows);
                  EXPECT_EQ(loss.scalar_type(), at::kBFloat16);
                  loss.backward();
                  std::size_t i = 0;
                  for (const at::Tensor& parameter : parameters_of(model)) {
                    EXPECT_EQ(parameter.scalar_type(), at::kFloat);
                    EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
                    // Each rank rounds its gradient to bf16 (8 significant bits), so the
                    // tolerance must be large.
                    EXPECT_TRUE(full_tensor(parameter.grad()).allclose(expected[i], 3e-2, 3e-3))
                        << i;
                    ++i;
                  }
                });
  }
}

/// Returns the sum of the gradients of two micro-batches on a 2 x 2 mesh (HSDP). Rank 0 has a large
/// gradient, and the other ranks have small gradients.
float gradient_over_replicas(Rank& rank, at::ScalarType reduce_dtype, bool zero3) {
  Filled<nn::Linear> linear(1, 1, {.bias = false});
  fully_shard(linear, rank.mesh({2, 2}, {"dp_replicate", "dp"}),
              {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = reduce_dtype},
               .reshard_after_forward = zero3});
  const at::Tensor x = at::ones({1, 1}).mul(rank.rank() == 0 ? 2.0 : 1.0 / 256);
  linear(x).sum().backward();
  linear(x).sum().backward();
  return full_grad(linear).item<float>();
}

TEST_ON_RANKS(MixedPrecision, ReducesInReduceDtypeOverReplicasAndMicroBatches, 4) {
  for (const bool zero3 : {true, false}) {
    // Expects the sum of two micro-batches, each averaged over four ranks. A sum in bf16 would lose
    // the small gradients, because 2 + 2^-7 is rounded to 2.
    EXPECT_EQ(gradient_over_replicas(rank, at::kFloat, zero3), 2 * (2 + 3.0F / 256) / 4);
    EXPECT_EQ(gradient_over_replicas(rank, at::kBFloat16, zero3), 2 * 2.0F / 4);
  }
}

struct Looking : nn::Module<Looking> {
  Looking() {
    weight = register_slot("weight", at::ones({3}));
    table = register_buffer_slot("table", {3});
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& ids) {
    seen = {x.scalar_type(), ids.scalar_type(), weight->scalar_type(), table->scalar_type()};
    return x.to(at::kFloat) * *weight;
  }
  nn::Parameter weight, table;
  std::vector<at::ScalarType> seen;
};

TEST_ON_RANKS(MixedPrecision, CastsOnlyFloatingInputsAndOnlyOnRequest, 2) {
  for (const bool cast : {true, false}) {
    Looking module;
    module.table->zero_();
    fully_shard(module, rank.mesh({2}, {"dp"}),
                {.mp_policy = {.param_dtype = at::kBFloat16, .cast_forward_inputs = cast}});
    module(at::ones({3}), at::ones({3}, at::kLong));
    EXPECT_EQ(module.seen, (std::vector<at::ScalarType>{cast ? at::kBFloat16 : at::kFloat,
                                                        at::kLong, at::kBFloat16, at::kFloat}));
  }
}

TEST_ON_MESH(MixedPrecision, CastsResultsToTheOutputOrInputDtype, {2}, {"dp"}) {
  const at::Tensor x = uniform_values({4, 3}, 0);
  Filled<nn::Linear> to_float(3, 2), to_input(3, 2);
  fully_shard(to_float, mesh,
              {.mp_policy = {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat}});
  EXPECT_EQ(to_float(x).scalar_type(), at::kFloat);
  fully_shard(to_input, mesh,
              {.mp_policy = {.param_dtype = at::kFloat, .restore_input_dtype = true}});
  EXPECT_EQ(to_input(x.to(at::kBFloat16)).scalar_type(), at::kBFloat16);
  EXPECT_EQ(to_input(x).scalar_type(), at::kFloat);
}

struct Scale : nn::Module<Scale> {
  Scale() { w = register_slot("w", at::ones({3})); }
  at::Tensor forward(const at::Tensor& x) { return x * *w; }
  nn::Parameter w;
};

struct ScaleNet : nn::Module<ScaleNet> {
  at::Tensor forward(const at::Tensor& x) { return (*scale)(x).sum(); }
  nn::Child<Scale> scale{*this, "scale"};
};

/// Sizes of a mesh (replicas, dp, tp), and the settings for the reductions of two micro-batches.
struct ReduceCase {
  std::vector<std::int64_t> sizes;
  bool offload = false;
  bool accumulates_unsharded = false;  ///< first micro-batch: set_requires_gradient_sync(false)
  bool accumulates_sums = false;       ///< first micro-batch: set_requires_all_reduce(false)
  double divisor = 0;                  ///< 0: the divisor is the number of data-parallel ranks
};

/// Gradients are 256 on rank 0 and 1 on other ranks. bf16 cannot represent the sums 257 and 513.
TEST(ReduceDtype, IsUsedInGroupsOfOneRank) {
  const std::vector<ReduceCase> cases{{{1, 1, 1}, false, false, false, 3},
                                      {{1, 1, 2}},
                                      {{1, 1, 4}},
                                      {{1, 2, 2}},
                                      {{2, 1, 2}},
                                      {{1, 1, 2}, false, false, false, 3},
                                      {{1, 2, 1}, false, false, false, 3},
                                      {{1, 1, 2}, true},
                                      {{1, 2, 2}, true},
                                      {{1, 1, 2}, false, true},
                                      {{1, 2, 2}, false, true},
                                      {{1, 1, 2}, false, false, true},
                                      {{1, 2, 1}, false, false, true},
                                      {{2, 1, 1}, false, false, true},
                                      {{1, 1, 1}, false, true, false, 3}};
  for (std::size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    const ReduceCase& c = cases[i];
    RunOnMesh(c.sizes, {"rep", "dp", "tp"}, [&](Rank& rank, const DeviceMesh& mesh) {
      ScaleNet model;
      tensor_parallel::parallelize_module(
          model, mesh["tp"], {{"scale", tensor_parallel::sequence_parallel({.sequence_dim = 0})}});
      Options options{.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
      if (c.offload) {
        options.offload_policy = OffloadPolicy{};
      }
      fully_shard(model, mesh[{"rep", "dp"}], options);
      if (c.divisor != 0) {
        set_gradient_divide_factor(model, c.divisor);
      }
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
      const double data_ranks = static_cast<double>(rank.size()) / static_cast<double>(tp_ranks);
      const double sum = 2 * (256 + rank.size() - 1);
      const at::Tensor gradient = full_tensor(model.scale->w.slot()->persistent().grad());
      EXPECT_EQ(gradient.scalar_type(), at::kFloat);
      EXPECT_TRUE(gradient.allclose(at::full({3}, sum / (c.divisor != 0 ? c.divisor : data_ranks)),
                                    1e-6, 0))
          << gradient;
    });
  }
}

/// Runs a backward in which each element of each rank's gradient is `value`; reduces in fp16.
at::Tensor gradient_in_half(Rank& rank, double value, const std::function<void(nn::Linear&)>& set) {
  Filled<nn::Linear> linear(3, 4, {.bias = false});
  fully_shard(linear, rank.mesh({rank.size()}, {"dp"}), {.mp_policy = {.reduce_dtype = at::kHalf}});
  set(linear);
  linear(at::ones({1, 3})).sum().mul(value).backward();
  return full_grad(linear);
}

TEST_ON_RANKS(ForceSum, SumsBeforeAnyDivision, 4) {
  const auto force = [](nn::Linear& linear) { set_force_sum_reduction(linear, true); };
  // In fp16, 4 * 20000 is infinite, and half of the smallest number (2^-24) is rounded to 0.
  EXPECT_TRUE(gradient_in_half(rank, 20000, force).isinf().all().item<bool>());
  EXPECT_TRUE(gradient_in_half(rank, 20000, [](auto&) {}).equal(at::ones({4, 3}).mul(20000)));
  const double least = std::ldexp(1.0, -24);
  EXPECT_TRUE(gradient_in_half(rank, least, force).equal(at::ones({4, 3}).mul(least)));
  EXPECT_TRUE(gradient_in_half(rank, least, [](auto&) {}).equal(at::zeros({4, 3})));
}

// With one rank, PyTorch's FSDP2 applies the divide factor twice: before and after the reduction.
TEST(DivideFactor, DividesOnce) {
  const std::vector<at::Tensor> expected = gradients_alone();
  for (const int ranks : {1, 3}) {
    RunSharded(ranks, [&](Rank& rank, ShardedModel& model) {
      set_gradient_divide_factor(model, 0.5);
      local_loss(model, rank).backward();
      expect_gradients(model, expected, rank.size() / 0.5);
    });
  }
  for (const int ranks : {1, 4}) {
    RunRanks(ranks, [](Rank& rank) {
      for (const bool force : {false, true}) {
        const at::Tensor gradient = gradient_in_half(rank, 2, [&](nn::Linear& linear) {
          set_force_sum_reduction(linear, force);
          set_gradient_divide_factor(linear, 8);
        });
        EXPECT_TRUE(gradient.equal(at::ones({4, 3}).mul(rank.size() / 4.0)));
      }
    });
  }
}

TEST(DtypeConversion, AppliesToTheNextForward) {
  const at::Tensor batch_in_double = batch(kDim, 0).to(at::kDouble);
  Filled<SmallModel> alone(kDim, kHidden, kClasses);
  alone.to(at::kDouble);
  fsdp::loss_of(alone, batch_in_double, 0, kRows).backward();
  const std::vector<at::Tensor> expected = gradients_of(alone);
  for (const int ranks : {1, 3}) {
    for (const bool trains_before : {false, true}) {
      RunSharded(ranks, [&](Rank& rank, ShardedModel& model) {
        if (trains_before) {
          local_loss(model, rank).backward();
          drop_gradients(model);
        }
        model.to(at::kDouble);
        const std::int64_t rows = kRows / rank.size();
        fsdp::loss_of(model, batch_in_double, rank.rank() * rows, rows).backward();
        EXPECT_EQ(model.head->slot("weight")->persistent().grad().scalar_type(), at::kDouble);
        expect_gradients(model, expected, 1, 1e-10, 1e-12);
      });
    }
  }
}

TEST_ON_RANKS(DtypeConversion, OfPartOfAUnitIsRefused, 2) {
  Filled<nn::Linear> linear(3, 4);
  fully_shard(linear, rank.mesh({2}, {"dp"}));
  linear.slot("bias")->set(linear.bias->detach().to(at::kDouble).requires_grad_());
  EXPECT_ERROR(linear(at::ones({2, 3})), "'bias'");
}

/// A process group whose reduce-scatter can average. `averages` counts such reduce-scatters.
class Averaging final : public testing::ForwardingCommunicator {
 public:
  Averaging(comm::CommunicatorPtr inner, int& averages)
      : ForwardingCommunicator(std::move(inner)), averages_(averages) {}

  bool averages_while_reducing() const override { return true; }
  comm::WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                               ReduceOp op) override {
    averages_ += static_cast<int>(op == ReduceOp::kAvg);
    return inner().reduce_scatter(output, input, op);
  }
  comm::WorkPtr reduce_scatter_group(const std::vector<at::Tensor>& outputs,
                                     const std::vector<at::Tensor>& inputs, ReduceOp op) override {
    averages_ += static_cast<int>(op == ReduceOp::kAvg);
    return inner().reduce_scatter_group(outputs, inputs, op);
  }

 private:
  int& averages_;
};

std::vector<at::Tensor> gradients_in(const comm::WorldPtr& world, const Rank& rank,
                                     const std::function<void(ShardedModel&)>& change) {
  ShardedModel model(init_device_mesh(world, {world->size()}, {"dp"}));
  change(model);
  local_loss(model, rank).backward();
  std::vector<at::Tensor> gradients;
  for (const auto& [name, slot] : model.named_slots()) {
    gradients.push_back(local_tensor(slot->persistent().grad()));
  }
  return gradients;
}

/// Runs one backward. Exactly `expected` reduce-scatters must average, and the gradients must be
/// the same as with a process group that can only sum.
void expect_averages(int ranks, int expected, const std::function<void(ShardedModel&)>& change) {
  RunRanks(ranks, [&](Rank& rank) {
    int averages = 0;
    const auto averaging = std::make_shared<testing::WrappedWorld>(
        rank.world(), [&](comm::CommunicatorPtr group, const std::string&) {
          return std::make_shared<Averaging>(std::move(group), averages);
        });
    const std::vector<at::Tensor> found = gradients_in(averaging, rank, change);
    EXPECT_EQ(averages, expected);
    EXPECT_EACH(found, gradients_in(rank.world(), rank, change));
  });
}

constexpr int kUnits = 4;

TEST(Average, IsComputedByReduceScatterIfPossible) {
  expect_averages(4, kUnits, [](ShardedModel&) {});
  expect_averages(3, 0, [](ShardedModel&) {});
  expect_averages(4, 0, [](ShardedModel& model) { set_gradient_divide_factor(model, 2); });
  expect_averages(
      4, 0, [](ShardedModel& model) { set_all_reduce_hook(model, [](const at::Tensor&) {}); });
  expect_averages(4, 0, [](ShardedModel& model) { set_force_sum_reduction(model, true); });
}

}  // namespace tessera::fsdp::precision
