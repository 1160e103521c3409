#include <limits>

#include "operator_case.h"
#include "testing/distributed.h"

namespace tessera {

// What PyTorch 2.11's DTensor gets silently wrong or hangs on, one case for each, with sizes that
// leave a shard short or empty.

namespace {

using testing::beside;
using testing::OperatorCases;
using testing::Operators;
using Tensors = std::vector<at::Tensor>;

at::Tensor targets(const at::Tensor& logits) {
  return beside(logits, at::tensor({1, 0, -100, 3, 2, -100, 4}, at::kLong));
}

const double kInfinity = std::numeric_limits<double>::infinity();

OperatorCases cases() {
  OperatorCases c;
  c.add("huber", {{8, 4}, {8, 4}}, [](auto& t) { return at::huber_loss(t[0], t[1]); });
  c.add("binary_cross_entropy", {{8, 4}}, [](auto& t) {
    return at::binary_cross_entropy(t[0].sigmoid(),
                                    beside(t[0], at::full({8, 4}, 0.3, at::kDouble)));
  });
  c.add("cross_entropy_ignore_index", {{7, 5}},
        [](auto& t) { return at::cross_entropy_loss(t[0], targets(t[0])); });
  c.add("cross_entropy_weights", {{7, 5}}, [](auto& t) {
    const auto weights = beside(t[0], at::tensor({.1, .2, .3, .4, .5}, at::kDouble));
    return at::cross_entropy_loss(t[0], targets(t[0]), weights);
  });
  c.add("division_by_a_matrix", {{7, 5}}, [](auto& t) { return 8.0 / (t[0] + 3); });
  c.add(
      "to_int", {{7, 5}}, [](auto& t) { return t[0].mul(9).to(at::kInt).to(at::kDouble); }, false);
  c.add("foreach_on_a_list", {{7, 5}}, [](auto& t) {
    const Tensors list{t[0].mul(1)};
    at::_foreach_add_(list, 1.0);
    at::_foreach_mul_(list, 2.0);
    return list[0];
  });
  c.add(
      "any_as_a_number", {{7, 5}},
      [](auto& t) { return (t[0] > 0).any(0).to(at::kInt).mul(2).sum().to(at::kDouble); }, false);
  c.add("max_with_empty_shard", {{6, 2}}, [](auto& t) { return t[0].max(); });
  c.add("cosine_similarity", {{7, 5}, {7, 5}},
        [](auto& t) { return at::cosine_similarity(t[0], t[1], -1); });
  c.add(
      "bits_as_integers", {{7, 5}}, [](auto& t) { return t[0].view(at::kLong).to(at::kDouble); },
      false);
  c.add("assigned_element", {{5}}, [](auto& t) {
    auto copy = t[0].mul(1);
    copy[0] = 1.0;
    return copy;
  });
  c.add("narrow_in_place", {{7, 5}}, [](auto& t) {
    auto copy = t[0].mul(1);
    copy.narrow(0, 0, 2).mul_(3);
    return copy;
  });
  c.add(
      "chunk_in_place", {{7, 5}},
      [](auto& t) {
        auto copy = t[0].mul(1);
        copy.chunk(3, 0)[1].mul_(3);
        return copy;
      },
      false);
  return c;
}

INSTANTIATE_TEST_SUITE_P(KnownDefects, Operators, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

TEST_ON_MESH(Items, PendingAndSplitTensorsGiveTheWholeValue, {4}, {"x"}) {
  const StrictScope strict;  // which allows reading one value
  const at::Tensor split = distribute_tensor(at::arange(6, at::kDouble), mesh, {Shard{0}});
  EXPECT_EQ(split.sum().item<double>(), 15);
  EXPECT_EQ(split.max().item<double>(), 5);
  const at::Tensor pending = distribute_tensor(at::full({}, 3.0), mesh, {Partial{}});
  EXPECT_EQ(pending.item<double>(), 3);
  EXPECT_TRUE(pending.is_nonzero());
  EXPECT_TRUE(at::equal(split, split));
}

// Pending reductions that PyTorch 2.11's DTensor gets wrong or refuses.

using testing::full_tensor;
using testing::values;

TEST_ON_MESH(UnlikePartials, AddUpAndJoin, {4}, {"x"}) {
  const auto as = [&](ReduceOp op) -> at::Tensor {
    return distribute_tensor(values({4, 3}), mesh, {Partial{op}});
  };
  EXPECT_CLOSE(as(ReduceOp::kAvg) + as(ReduceOp::kSum), values({4, 3}) * 2);
  EXPECT_CLOSE(as(ReduceOp::kMax) + as(ReduceOp::kMin), values({4, 3}) * 2);
  EXPECT_CLOSE(at::cat({as(ReduceOp::kMax), as(ReduceOp::kSum)}),
               at::cat({values({4, 3}), values({4, 3})}));
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
    EXPECT_CLOSE(found.detach(), expected);
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

}  // namespace
}  // namespace tessera
