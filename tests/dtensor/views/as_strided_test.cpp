// as_strided indexes memory: a distributed tensor's begins at its own first element, also for a
// view.

#include <optional>

#include "testing/distributed.h"

namespace tessera {
namespace {

using Change = std::function<at::Tensor(at::Tensor x)>;

/// The result and what it leaves of x equal one rank's, for every placement but one, with which it
/// is refused.
void expect_as_one_rank(const Change& change,
                        const std::optional<Placement>& refused = std::nullopt) {
  auto plain = at::arange(42, at::kDouble).view({6, 7});
  const auto expected = change(plain);
  RunOnMesh({3}, {"x"}, [&](const DeviceMesh& mesh) {
    for (const Placement& placement :
         {Placement(Replicate{}), Placement(Shard{0}), Placement(Shard{1}), Placement(Partial{}),
          Placement(Partial{ReduceOp::kMax})}) {
      const auto x = distribute_tensor(at::arange(42, at::kDouble).view({6, 7}), mesh, {placement});
      if (placement == refused) {
        EXPECT_ERROR(change(x.tensor().detach()), "but was gathered and has");
        continue;
      }
      const auto found = change(x.tensor().detach());
      EXPECT_TRUE(at::equal(DistributedTensor(found).full_tensor(), expected))
          << to_string(placement) << DistributedTensor(found).full_tensor();
      EXPECT_TRUE(at::equal(x.full_tensor(), plain)) << to_string(placement);
    }
  });
}

TEST(AsStrided, WithItsOwnOffsetReadsTheViewItself) {
  expect_as_one_rank([](at::Tensor x) {
    const auto view = x.slice(1, 2, 4);
    return view.as_strided({3, 2}, {7, 1}, view.storage_offset()).clone();
  });
  expect_as_one_rank([](at::Tensor x) {
    const auto view = x.chunk(3, 1)[1];
    return at::as_strided_copy(view, {2}, {1}, view.storage_offset());
  });
  expect_as_one_rank([](at::Tensor x) {
    const auto view = x.slice(0, 2);
    return at::as_strided_scatter(view, at::zeros_like(view.select(0, 0)), {7}, {1},
                                  view.storage_offset());
  });
}

TEST(AsStrided, WithAnOffsetCountsFromTheBeginningOfTheView) {
  expect_as_one_rank([](at::Tensor x) {
    const auto view = x.slice(0, 2);
    return view.as_strided({2}, {1}, view.storage_offset() + 7).clone();
  });
}

TEST(AsStrided, ReachesBeyondAViewOnlyWhereItsMemoryIsThere) {
  RunOnMesh({3}, {"x"}, [](const DeviceMesh& mesh) {
    const auto beside = [&](const Placement& placement) {
      const at::Tensor x =
          distribute_tensor(at::arange(42, at::kDouble).view({6, 7}), mesh, {placement});
      return x.slice(1, 2, 4).as_strided({2}, {1}, 2);
    };
    EXPECT_TRUE(at::equal(DistributedTensor(beside(Replicate{})).full_tensor(),
                          at::tensor({4.0, 5.0}, at::kDouble)));
    EXPECT_ERROR(beside(Shard{0}),
                 "memory between the elements of a tensor that has to be gathered");
    const at::Tensor column =
        distribute_tensor(at::arange(6, at::kDouble).view({6, 1}), mesh, {Shard{0}});
    const auto part = column.expand({6, 4}).as_strided({3}, {1}, 2);
    EXPECT_TRUE(
        at::equal(DistributedTensor(part).full_tensor(), at::tensor({2.0, 3.0, 4.0}, at::kDouble)));
  });
}

TEST(AsStrided, FillsTheDiagonalOfAViewAlone) {
  expect_as_one_rank([](at::Tensor x) { return x.fill_diagonal_(2.0).clone(); });
  expect_as_one_rank([](at::Tensor x) { return x.slice(1, 2, 4).fill_diagonal_(2.0).clone(); });
  expect_as_one_rank([](at::Tensor x) { return x.slice(0, 1, 4).fill_diagonal_(2.0).clone(); });
  expect_as_one_rank([](at::Tensor x) { return x.chunk(3, 1)[1].fill_diagonal_(2.0).clone(); });
  expect_as_one_rank([](at::Tensor x) { return x.t().slice(1, 3).fill_diagonal_(2.0).clone(); },
                     Shard{0});
  expect_as_one_rank([](at::Tensor x) { return x.t().slice(0, 3).fill_diagonal_(2.0).clone(); },
                     Shard{1});
}

}  // namespace
}  // namespace tessera
