// Quantiles of distributed tensors: gradients, what libtorch gives to the bit, and what it refuses.

#include <limits>
#include <optional>

#include "dtensor/operators/operator_case.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::OperatorCase;
using testing::Operators;

std::vector<OperatorCase> quantiles() {
  return {
      {"quantile", {{5, 3}}, [](auto& t) { return at::quantile(t[0], 0.3, 0); }},
      {"quantiles", {{5, 3}, {4}}, [](auto& t) { return at::quantile(t[0], t[1].square(), 1); }},
      {"nanquantile", {{5, 3}}, [](auto& t) { return at::nanquantile(t[0], 0.5, 0, true); }},
  };
}

INSTANTIATE_TEST_SUITE_P(Quantile, Operators, ::testing::ValuesIn(quantiles()),
                         [](const auto& info) { return info.param.name; });

/// Floats, some equal and one not a number; libtorch looks up few quantiles of many values
/// otherwise than many of few.
at::Tensor values_of(std::int64_t rows) {
  at::Tensor values =
      at::sin(at::arange(rows * 3, at::kFloat)).mul(8).round().div(3).view({rows, 3});
  values[rows / 2][1] = std::numeric_limits<float>::quiet_NaN();
  return values;
}

using Quantile = at::Tensor (*)(const at::Tensor&, const at::Tensor&, std::optional<std::int64_t>,
                                bool, c10::string_view);

void expect_as_plain(Quantile quantile, const at::Tensor& values, const DeviceMesh& mesh,
                     const char* interpolation) {
  const at::Tensor tenths = at::arange(11, at::kFloat).div(10);
  const ReplicationScope quantiles_are_equal;
  for (const auto& q : {tenths, tenths[3], tenths.narrow(0, 7, 1)}) {
    for (const auto dim : {std::optional<std::int64_t>{}, {0}, {1}, {-1}, {-2}}) {
      for (const bool keepdim : {false, true}) {
        const at::Tensor expected = quantile(values, q, dim, keepdim, interpolation);
        const at::Tensor x = distribute_tensor(values, mesh, {Shard{0}}).tensor();
        const DistributedTensor found(quantile(x, q, dim, keepdim, interpolation));
        EXPECT_TRUE(at::allclose(found.full_tensor(), expected, 0, 0, /*equal_nan=*/true))
            << interpolation << " of " << q << " along " << dim.value_or(9) << "\n"
            << found.full_tensor() << "\nexpected\n"
            << expected;
      }
    }
  }
}

TEST(Quantile, IsLibtorchsToTheBit) {
  RunOnMesh({4}, {"x"}, [](const DeviceMesh& mesh) {
    for (const std::int64_t rows : {1, 5}) {
      for (const auto* interpolation : {"linear", "lower", "higher", "midpoint", "nearest"}) {
        expect_as_plain(&at::quantile, values_of(rows), mesh, interpolation);
        expect_as_plain(&at::nanquantile, values_of(rows), mesh, interpolation);
      }
    }
  });
}

TEST(Quantile, WritesToADistributedResult) {
  RunOnMesh({4}, {"x"}, [](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(values_of(6), mesh, {Shard{0}}).tensor();
    at::Tensor out = distribute_tensor(at::zeros({3}), mesh, {Replicate{}}).tensor();
    at::nanquantile_out(out, x, 0.3, 0);
    const at::Tensor expected = at::nanquantile(values_of(6), 0.3, 0);
    EXPECT_TRUE(at::equal(DistributedTensor(out).full_tensor(), expected));
    EXPECT_ERROR(at::nanquantile_out(out, x, 0.3), "would resize a distributed tensor");
  });
}

}  // namespace
}  // namespace tessera
