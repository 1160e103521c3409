// More of what PyTorch 2.11's DTensor gets wrong or refuses: pending reductions, and dimensions
// that two mesh dimensions split, in either order.

#include <limits>
#include <ostream>
#include <tuple>

#include "operator_case.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::full_tensor;
using testing::OperatorCase;
using testing::values;
using Tensors = std::vector<at::Tensor>;

class KnownDefectsOfLists : public ::testing::TestWithParam<OperatorCase> {};

TEST_P(KnownDefectsOfLists, AreRightHere) {
  testing::expect_equals_one_rank(GetParam(), {4});
}

INSTANTIATE_TEST_SUITE_P(
    All, KnownDefectsOfLists,
    ::testing::Values(
        OperatorCase{
            "zero_dim_over_matrix", {{7, 5}}, [](auto& t) { return t[0].sum().div(t[0] + 3); }},
        OperatorCase{"ones_like", {{7, 5}}, [](auto& t) { return at::ones_like(t[0]); }, false},
        OperatorCase{"bits_as_integers",
                     {{7, 5}},
                     [](auto& t) { return t[0].view(at::kLong).to(at::kDouble); },
                     false},
        OperatorCase{"half", {{7, 5}}, [](auto& t) { return t[0].to(at::kHalf).to(at::kDouble); }},
        OperatorCase{"norm_inf_with_empty_shard",
                     {{6, 2}},
                     [](auto& t) { return t[0].norm(std::numeric_limits<double>::infinity()); }},
        OperatorCase{"min_with_empty_shard", {{6, 2}}, [](auto& t) { return t[0].min(); }},
        OperatorCase{"min_of_columns", {{6, 2}}, [](auto& t) { return std::get<0>(t[0].min(0)); }},
        OperatorCase{"assigned_element",
                     {{5}},
                     [](auto& t) {
                       auto copy = t[0].mul(1);
                       copy[0] = 1.0;
                       return copy;
                     }},
        OperatorCase{"narrow_in_place",
                     {{7, 5}},
                     [](auto& t) {
                       auto copy = t[0].mul(1);
                       copy.narrow(0, 0, 2).mul_(3);
                       return copy;
                     }},
        // libtorch forbids this one where a gradient is wanted.
        OperatorCase{"chunk_in_place",
                     {{7, 5}},
                     [](auto& t) {
                       auto copy = t[0].mul(1);
                       copy.chunk(3, 0)[1].mul_(3);
                       return copy;
                     },
                     false},
        OperatorCase{"chunks",
                     {{7, 5}},
                     [](auto& t) {
                       const auto parts = t[0].chunk(3, 0);
                       return at::cat({parts[2].mul(3), parts[0].mul(parts[1])});
                     }}),
    [](const auto& info) { return info.param.name; });

TEST(UnlikePartials, AddUpAndJoin) {
  RunOnMesh({4}, {"x"}, [](const DeviceMesh& mesh) {
    const auto as = [&](ReduceOp op) -> at::Tensor {
      return distribute_tensor(values({4, 3}), mesh, {Partial{op}});
    };
    EXPECT_TRUE(
        at::allclose(full_tensor(as(ReduceOp::kAvg) + as(ReduceOp::kSum)), values({4, 3}) * 2));
    EXPECT_TRUE(
        at::allclose(full_tensor(as(ReduceOp::kMax) + as(ReduceOp::kMin)), values({4, 3}) * 2));
    EXPECT_TRUE(at::allclose(full_tensor(at::cat({as(ReduceOp::kMax), as(ReduceOp::kSum)})),
                             at::cat({values({4, 3}), values({4, 3})})));
  });
}

/// 8 / x, where x is the sum of unlike terms, forward and backward.
void check_quotient(const std::function<at::Tensor(const at::Tensor&)>& divide_eight_by) {
  auto plain = values({7, 5}).add(3).requires_grad_();
  const auto expected = 8.0 / plain;
  expected.mul(values({7, 5}, 1)).sum().backward();
  RunOnMesh({4}, {"x"}, [&](Rank& rank, const DeviceMesh& mesh) {
    // Terms of 1, 2, 3 and 4 tenths: none is 0, and none is the value.
    const auto term = plain.detach() * ((rank.rank() + 1) / 10.0);
    const auto leaf = DistributedTensor::from_local(term, mesh, {Partial{}});
    leaf.tensor().requires_grad_();
    ASSERT_EQ(leaf.placements(), Placements{Partial{}});
    const auto found = divide_eight_by(leaf.tensor());
    found.mul(distribute_tensor(values({7, 5}, 1), mesh, {Replicate{}})).sum().backward();
    EXPECT_TRUE(at::allclose(DistributedTensor(found.detach()).full_tensor(), expected));
    const DistributedTensor gradient(leaf.tensor().grad());
    EXPECT_EQ(gradient.placements(), Placements{Replicate{}});
    EXPECT_TRUE(at::allclose(local_tensor(gradient), plain.grad()));
  });
}

TEST(PendingReductions, AreReducedBeforeTheyDivide) {
  check_quotient([](const at::Tensor& x) { return 8.0 / x; });
  check_quotient([](const at::Tensor& x) { return at::scalar_tensor(8.0, at::kDouble) / x; });
  check_quotient([](const at::Tensor& x) {
    const at::Tensor eight = distribute_tensor(at::scalar_tensor(8.0, at::kDouble),
                                               sharding_spec(x).mesh, {Replicate{}});
    return eight / x;
  });
}

struct Doubly {
  const char* name;
  std::function<at::Tensor(const Tensors&)> run;
};
std::ostream& operator<<(std::ostream& out, const Doubly& c) {
  return out << c.name;
}

/// A dimension split by both mesh dimensions, in the mesh's order and in FSDP's.
class SplitTwice : public ::testing::TestWithParam<Doubly> {};

TEST_P(SplitTwice, ForwardAndBackwardEqualOneRank) {
  const auto& run = GetParam().run;
  for (const std::int64_t rows : {8, 7}) {
    auto plain = values({rows, 3}).requires_grad_();
    const auto expected = run({plain});
    expected.mul(values(expected.sizes())).sum().backward();
    RunOnMesh({2, 2}, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
      for (const auto& placements :
           {Placements{Shard{0}, Shard{0}}, Placements{StridedShard{0, 2}, Shard{0}}}) {
        const auto leaf = distribute_tensor(values({rows, 3}), mesh, placements).tensor().detach();
        leaf.requires_grad_();
        const auto found = run({leaf});
        const at::Tensor weights =
            distribute_tensor(values(found.sizes()), mesh, {Replicate{}, Replicate{}});
        found.mul(weights).sum().backward();
        EXPECT_TRUE(at::allclose(DistributedTensor(found.detach()).full_tensor(), expected));
        EXPECT_TRUE(at::allclose(DistributedTensor(leaf.grad()).full_tensor(), plain.grad()))
            << to_string(placements);
        EXPECT_EQ(DistributedTensor(leaf.grad()).placements(), placements);
      }
    });
  }
}

at::Tensor beside(const at::Tensor& other, const at::Tensor& tensor) {
  if (!tessera::is_distributed(other)) {
    return tensor;
  }
  return distribute_tensor(tensor, sharding_spec(other).mesh, {Replicate{}, Replicate{}});
}

INSTANTIATE_TEST_SUITE_P(
    All, SplitTwice,
    ::testing::Values(
        Doubly{"softmax", [](const Tensors& t) { return at::softmax(t[0], 0); }},
        Doubly{"cumsum", [](const Tensors& t) { return t[0].cumsum(0); }},
        Doubly{"var", [](const Tensors& t) { return t[0].var(0); }},
        Doubly{"mm", [](const Tensors& t) { return at::mm(t[0].t(), t[0]); }},
        Doubly{"select", [](const Tensors& t) { return t[0].select(0, 2).mul(2); }},
        Doubly{"slice", [](const Tensors& t) { return t[0].slice(0, 1, 6).mul(2); }},
        Doubly{"cat", [](const Tensors& t) { return at::cat({t[0], t[0]}); }},
        Doubly{"stack", [](const Tensors& t) { return at::stack({t[0], t[0]}, 1); }},
        Doubly{"split", [](const Tensors& t) { return t[0].split(3)[1].mul(2); }},
        Doubly{"max", [](const Tensors& t) { return std::get<0>(t[0].max(0)); }},
        Doubly{"argmax", [](const Tensors& t) { return t[0].add(t[0].argmax(0).to(at::kDouble)); }},
        Doubly{"gather",
               [](const Tensors& t) {
                 const auto index = at::tensor({6, 0, 3, 3, 1, 6}, at::kLong).view({2, 3});
                 return t[0].gather(0, beside(t[0], index));
               }},
        Doubly{"embedding",
               [](const Tensors& t) {
                 return at::embedding(t[0], beside(t[0], at::tensor({6, 0, 3, 3}, at::kLong)));
               }}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera
