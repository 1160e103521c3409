#include <limits>

#include "dtensor/operators/operator_case.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/dtensor/communication_scope.h"
#include "testing/distributed.h"

namespace tessera {

// Tests reductions and scans along a sharded dimension. The sent bytes must be those of the result.
// Some shards are short or empty. Values include ties, NaNs and infinities.

namespace {

using testing::kInfinity;
using testing::OperatorCases;
using testing::Operators;

const double kNan = std::numeric_limits<double>::quiet_NaN();

OperatorCases lowering_cases() {
  OperatorCases c;
  c.add("norm_half", {{7, 5}}, [](auto& t) { return at::linalg_vector_norm(t[0], 0.5); });
  c.add("norm_minus_inf", {{6, 5}},
        [](auto& t) { return at::linalg_vector_norm(t[0], -kInfinity); });
  c.add("gather_some", {{7, 5}}, [](auto& t) {
    const auto index = at::tensor({6, 0, 3, 3, 5}, at::kLong).view({1, 5});
    return t[0].gather(0, testing::beside(t[0], index));
  });
  c.add("batch_norm", {{5, 3, 2}, {3}, {3}},
        [](auto& t) { return at::batch_norm(t[0], t[1], t[2], {}, {}, true, 0.1, 1e-5, false); });
  return c;
}

INSTANTIATE_TEST_SUITE_P(Forms, Operators, ::testing::ValuesIn(lowering_cases()),
                         [](const auto& info) { return info.param.name; });

/// Expects equal results of `function` for plain `values` and for sharded `values`.
template <class Function>
void expect_same(const at::Tensor& values, const Function& function) {
  const auto expected = function(values);
  RunOnMesh({4}, {"x"}, [&](const DeviceMesh& mesh) {
    for (std::int64_t dim = 0; dim < values.dim(); ++dim) {
      const auto found = function(distribute_tensor(values, mesh, {Shard{dim}}).tensor());
      const auto whole = DistributedTensor(found).full_tensor();
      EXPECT_EQ(whole.scalar_type(), expected.scalar_type());
      EXPECT_TRUE(at::allclose(whole, expected, 1e-5, 1e-8, true)) << whole << expected;
    }
  });
}

TEST(Extremum, IsNanOrInfiniteLikeItsElements) {
  auto values = at::arange(35, at::kFloat).view({7, 5}).clone();
  values.index_put_({at::tensor({2, 6}), at::tensor({1, 1})}, at::tensor(kNan).to(at::kFloat));
  expect_same(values, [](const at::Tensor& t) { return t.amax(0); });
  expect_same(at::full({6, 3}, -kInfinity), [](const at::Tensor& t) { return t.amax(0); });
}

TEST(Norm, SumsHalfPrecisionInSinglePrecision) {
  const auto values = at::full({512, 4}, 100.0, at::kHalf);
  expect_same(values,
              [](const at::Tensor& t) { return at::linalg_vector_norm(t, 2, at::IntArrayRef{0}); });
}

// batch_norm redistributes its running statistics to the layout of x's channels, and back.
TEST(BatchNorm, UpdatesRedistributedStatistics) {
  const at::Tensor values = at::sin(at::arange(48, at::kDouble)).view({4, 3, 4});
  const at::Tensor statistics = at::arange(1, 13, at::kDouble).view({4, 3});
  const auto update = [](const at::Tensor& x, const at::Tensor& of_batches) {
    at::batch_norm(x, {}, {}, of_batches.select(0, 1), of_batches.select(0, 2), true, 0.1, 1e-5,
                   false);
  };
  const at::Tensor expected = statistics.clone();
  update(values, expected);
  RunOnMesh({2}, {"x"}, [&](const DeviceMesh& mesh) {
    const auto in = [&](const at::Tensor& tensor, const Placement& placement) {
      return DistributedTensor(distribute_tensor(tensor.clone(), mesh, {Replicate{}}))
          .redistribute({placement})
          .tensor();
    };
    for (const Placement& of_values :
         {Placement{Replicate{}}, Placement{Shard{0}}, Placement{Shard{1}}, Placement{Partial{}}}) {
      for (const Placement& of_statistics :
           {Placement{Replicate{}}, Placement{Shard{0}}, Placement{Shard{1}}}) {
        const at::Tensor found = in(statistics, of_statistics);
        update(in(values, of_values), found);
        EXPECT_CLOSE(found, expected) << of_values << " " << of_statistics;
      }
    }
    const at::Tensor mean = in(at::zeros({1}, at::kDouble), Shard{0});
    const at::Tensor variance = in(at::ones({1}, at::kDouble), Shard{0});
    at::batch_norm(in(at::arange(16, at::kDouble).view({4, 1, 4}), Partial{}), {}, {}, mean,
                   variance, true, 0.1, 1e-5, false);
    EXPECT_DOUBLE_EQ(DistributedTensor(mean).full_tensor().item<double>(), 0.75);
  });
}

TEST_ON_MESH(Lowerings, ThatCommunicateAreRefusedInAStrictScope, {4}, {"x"}) {
  const at::Tensor x = distribute_tensor(at::arange(32.0).view({8, 4}), mesh, {Shard{0}});
  const StrictScope strict;
  EXPECT_ERROR(at::linalg_vector_norm(x), "linalg_vector_norm", "strict scope refuses");
  EXPECT_NO_THROW(x.amax(0));
}

// On the meta device, results and gradients must have the sizes that they have on the CPU.

namespace meta_sizes {

using Sizes = std::vector<std::int64_t>;
using Tensors = std::vector<at::Tensor>;

struct Function {
  const char* name;
  std::vector<Sizes> inputs;
  std::function<at::Tensor(const Tensors&)> compute;
};

std::vector<Function> functions() {
  std::vector<Function> all;
  const auto add = [&](const char* name, const std::vector<Sizes>& inputs, auto compute) {
    all.push_back({name, inputs, compute});
  };
  add("conv1d", {{5, 4, 6}, {6, 2, 3}, {6}},
      [](auto& t) { return at::conv1d(t[0], t[1], t[2], 1, 1, 1, 2); });
  add("conv2d", {{3, 2, 7, 6}, {4, 2, 3, 2}, {4}},
      [](auto& t) { return at::conv2d(t[0], t[1], t[2], 2, 1); });
  add("transposed", {{2, 4, 5, 4}, {4, 2, 3, 3}, {4}},
      [](auto& t) { return at::conv_transpose2d(t[0], t[1], t[2], 2, 1, 1, 2); });
  add("no_rows", {{0, 2, 7, 6}, {4, 2, 3, 2}, {4}},
      [](auto& t) { return at::conv2d(t[0], t[1], t[2]); });
  add("batch_norm", {{3, 2, 7, 6}, {2}, {2}},
      [](auto& t) { return at::batch_norm(t[0], t[1], t[2], {}, {}, true, 0.1, 1e-5, false); });
  add("layer_norm", {{3, 4, 6}, {6}, {6}},
      [](auto& t) { return at::layer_norm(t[0], {6}, t[1], t[2]); });
  return all;
}

template <class Make>
std::vector<Sizes> sizes_of(const Function& function, Make make) {
  Tensors inputs;
  for (const Sizes& sizes : function.inputs) {
    inputs.push_back(make(sizes).requires_grad_());
  }
  const at::Tensor result = function.compute(inputs);
  std::vector<Sizes> found{result.sizes().vec()};
  result.sum().backward();
  for (const at::Tensor& input : inputs) {
    found.push_back(input.grad().sizes().vec());
  }
  return found;
}

TEST(MetaTensors, HaveTheSizesOfRealTensors) {
  for (const Function& each : functions()) {
    const auto real = sizes_of(each, [](auto& sizes) { return at::ones(sizes); });
    EXPECT_EQ(sizes_of(each, [](auto& sizes) { return at::ones(sizes, at::kMeta); }), real)
        << each.name;
    for (const Placement placement : {Placement(Replicate{}), Placement(Shard{0})}) {
      const ReplicationScope all_ranks_have_the_same_ids;
      const DeviceMesh mesh = init_device_mesh(comm::meta_world(1, 2), {2}, {"tp"});
      EXPECT_EQ(sizes_of(each,
                         [&](auto& sizes) {
                           return distribute_tensor(at::ones(sizes, at::kMeta), mesh, {placement})
                               .tensor()
                               .detach();
                         }),
                real)
          << each.name << to_string(placement);
    }
  }
}

}  // namespace meta_sizes
}  // namespace
}  // namespace tessera
