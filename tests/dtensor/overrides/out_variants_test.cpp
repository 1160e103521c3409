// Composite operators with out=: what they write must arrive in the distributed tensor.

#include <ostream>

#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::values;
using Tensors = std::vector<at::Tensor>;

struct OutCase {
  std::string name;
  std::vector<std::vector<std::int64_t>> inputs;
  std::function<void(at::Tensor& out, const Tensors&)> run;
  std::vector<std::int64_t> result;
};

std::ostream& operator<<(std::ostream& stream, const OutCase& c) {
  return stream << c.name;
}

class OutVariant : public ::testing::TestWithParam<OutCase> {};

TEST_P(OutVariant, WritesToATensorHoweverItLies) {
  const auto& c = GetParam();
  Tensors plain;
  for (const auto& sizes : c.inputs) {
    plain.push_back(values(sizes));
  }
  auto expected = at::zeros(c.result, at::kDouble);
  c.run(expected, plain);
  RunOnMesh({4}, {"x"}, [&](const DeviceMesh& mesh) {
    for (const Placement& placement : {Placement{Replicate{}}, Placement{Shard{0}}}) {
      Tensors inputs;
      for (const auto& x : plain) {
        inputs.push_back(distribute_tensor(x, mesh, {Shard{0}}));
      }
      at::Tensor out = distribute_tensor(at::zeros(c.result, at::kDouble), mesh, {placement});
      c.run(out, inputs);
      EXPECT_EQ(DistributedTensor(out).placements(), Placements{placement});
      EXPECT_TRUE(at::allclose(DistributedTensor(out).full_tensor(), expected));
    }
  });
}

// Split, the first two lie on one or two ranks; the operators of the others would resize theirs.
std::vector<OutCase> out_cases() {
  return {
      {"maximum_of_all",
       {{4}},
       [](auto& out, auto& t) { at::amax_out(out, t[0], {0}, true); },
       {1}},
      {"sum_of_columns", {{5, 2}}, [](auto& out, auto& t) { at::sum_out(out, t[0], {0}); }, {2}},
      {"kron", {{3, 2}, {2, 3}}, [](auto& out, auto& t) { at::kron_out(out, t[0], t[1]); }, {6, 6}},
      {"matmul_of_batches",
       {{5, 3, 2}, {5, 2, 4}},
       [](auto& out, auto& t) { at::matmul_out(out, t[0], t[1]); },
       {5, 3, 4}},
      {"matmul_of_a_batch_and_a_matrix",
       {{5, 3, 2}, {2, 4}},
       [](auto& out, auto& t) { at::matmul_out(out, t[0], t[1]); },
       {5, 3, 4}},
      {"log_sigmoid", {{5, 3}}, [](auto& out, auto& t) { at::log_sigmoid_out(out, t[0]); }, {5, 3}},
      {"solve",
       {{5, 2, 2}, {5, 2, 3}},
       [](auto& out, auto& t) { at::linalg_solve_out(out, t[0], t[1]); },
       {5, 2, 3}},
      {"msort", {{5, 3}}, [](auto& out, auto& t) { at::msort_out(out, t[0]); }, {5, 3}},
      {"det", {{5, 2, 2}}, [](auto& out, auto& t) { at::linalg_det_out(out, t[0]); }, {5}},
      {"inverse",
       {{5, 2, 2}},
       [](auto& out, auto& t) { at::linalg_inv_out(out, t[0]); },
       {5, 2, 2}},
  };
}

INSTANTIATE_TEST_SUITE_P(Composite, OutVariant, ::testing::ValuesIn(out_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(OutVariantOfAnotherSize, IsRefusedOnAllRanks) {
  const auto errors = testing::ErrorsOfRanks(4, [](Rank& rank) {
    const auto mesh = rank.mesh({4}, {"x"});
    const at::Tensor x = distribute_tensor(values({5, 3}), mesh, {Shard{0}});
    at::Tensor out = distribute_tensor(at::zeros({15, 1}, at::kDouble), mesh, {Shard{0}});
    at::kron_out(out, x, x);
  });
  EXPECT_CONTAINS(errors, "would resize a distributed tensor of sizes [15, 1] to [25, 9]");
}

TEST(OutVariantOfAnotherSize, KeepsTheSizesOfWhatItRefused) {
  RunOnMesh({4}, {"x"}, [](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(values({5, 3}), mesh, {Shard{0}});
    for (const Placement& placement : {Placement{Replicate{}}, Placement{Shard{0}}}) {
      at::Tensor out = distribute_tensor(at::zeros({2, 1}, at::kDouble), mesh, {placement});
      EXPECT_ERROR(at::add_out(out, x, x),
                   "would resize a distributed tensor of sizes [2, 1] to [5, 3]");
      EXPECT_EQ(DistributedTensor(out).full_tensor().sizes(), at::IntArrayRef({2, 1}));
    }
  });
}

TEST(OutVariantOfAnotherSize, ResizesAnEmptyTensor) {
  RunOnMesh({4}, {"x"}, [](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(values({5, 3}), mesh, {Shard{0}});
    for (const Placement& placement : {Placement{Replicate{}}, Placement{Shard{0}}}) {
      at::Tensor out = distribute_tensor(at::zeros({0}, at::kDouble), mesh, {placement});
      at::add_out(out, x, x);
      EXPECT_TRUE(at::equal(DistributedTensor(out).full_tensor(), values({5, 3}).mul(2)));
    }
  });
}

}  // namespace
}  // namespace tessera
