#include <c10/core/InferenceMode.h>

#include <thread>

#include "tessera/dtensor/random.h"
#include "testing/distributed.h"

namespace tessera {

// Tests writes through views of distributed tensors, with and without autograd. A write must change
// the viewed tensor, or throw.

namespace {

using testing::values;

struct ViewCase {
  const char* name;
  std::function<void(at::Tensor&)> write;
  /// `rows`: whether the write to a tensor with placement Shard(0) needs no communication, so that
  /// a StrictScope allows the write. `columns`: the same for placement Shard(1).
  bool rows = true;
  bool columns = true;
};

/// Computes y = 2 * x and writes through a view of y. Returns y and the gradient of sum(y^3) in x.
std::pair<at::Tensor, at::Tensor> run(const ViewCase& c, const at::Tensor& x) {
  auto y = x.mul(2);
  c.write(y);
  y.pow(3).sum().backward();
  return {y.detach(), x.grad()};
}

const std::vector<ViewCase>& writes_through_views() {
  static const std::vector<ViewCase> all{
      {"transpose", [](auto& y) { y.t().mul_(3); }},
      {"flatten", [](auto& y) { y.view({42}).mul_(3); }},
      {"unsqueeze", [](auto& y) { y.unsqueeze(1).add_(1); }},
      {"first_rows", [](auto& y) { y.slice(0, 0, 2).zero_(); }, false, true},
      {"first_columns", [](auto& y) { y.slice(1, 0, 2).zero_(); }, true, false},
      {"row", [](auto& y) { y.select(0, 1).fill_(1.0); }, false, true},
      {"diagonal", [](auto& y) { y.diagonal().zero_(); }, false, false},
      {"of_a_view", [](auto& y) { y.t().unsqueeze(0).mul_(3); }},
      {"narrow_copy", [](auto& y) { y.narrow(1, 2, 3).copy_(y.narrow(1, 0, 3).clone()); }, true,
       false}};
  return all;
}

TEST_ON_MESH(WriteThroughView, ReachesTheBase, {4}, {"x"}) {
  for (const ViewCase& c : writes_through_views()) {
    const auto expected = run(c, values({7, 6}).requires_grad_());
    for (const auto& [placement, writable] : std::vector<std::pair<Placement, bool>>{
             {Replicate{}, true}, {Shard{0}, c.rows}, {Shard{1}, c.columns}}) {
      SCOPED_TRACE(c.name + to_string(placement));
      const auto x = distribute_tensor(values({7, 6}), mesh, {placement}).tensor().detach();
      {
        at::NoGradGuard no_grad;
        StrictScope strict;
        auto y = x.clone();
        if (writable) {
          EXPECT_NO_THROW(c.write(y));
        } else {
          EXPECT_ERROR(c.write(y), "the strict scope refuses");
        }
      }
      const auto found = run(c, x.requires_grad_());
      EXPECT_CLOSE(found.first, expected.first);
      EXPECT_CLOSE(found.second, expected.second);
    }
  }
}

TEST_ON_MESH(View, SharesMemoryAndVersionWithItsBase, {2}, {"x"}) {
  const at::Tensor x = distribute_tensor(at::zeros({4, 2}), mesh, {Shard{0}});
  const auto view = x.t();
  const auto version = x._version();
  view.add_(1);
  EXPECT_EQ(x._version(), version + 1);
  EXPECT_EQ(local_tensor(x)._version(), version + 1);
  EXPECT_TRUE(at::equal(local_tensor(x), at::ones({2, 2})));
}

TEST_ON_MESH(View, WithInvalidSizesIsRefusedOnEveryRank, {2}, {"x"}) {
  const at::Tensor x = distribute_tensor(values({2, 3}), mesh, {Shard{0}});
  EXPECT_THROWN(c10::Error, x.t().view({6}), "view size is not compatible");
  for (const bool reshapes : {false, true}) {
    EXPECT_THROWN(c10::Error, reshapes ? x.reshape({4}) : x.view({4}),
                  "shape '[4]' is invalid for input of size 6", "global", "[2, 3]");
  }
}

TEST_ON_MESH(InferredSize, IsTheGlobalSizeForAnEmptyShard, {4}, {"dp"}) {
  const at::Tensor x = distribute_tensor(values({2, 6, 8}), mesh, {Shard{0}});
  EXPECT_EQ(local_tensor(x).size(0), rank.rank() < 2 ? 1 : 0);
  const at::Tensor y = x.view({2, 6, -1, 4}), z = x.reshape({-1, 6, 2, 4});
  const std::vector<std::int64_t> local{rank.rank() < 2 ? 1 : 0, 6, 2, 4};
  EXPECT_EQ(local_tensor(y).sizes(), local);
  EXPECT_EQUAL(y, values({2, 6, 2, 4}));
  EXPECT_EQUAL(z, values({2, 6, 2, 4}));
}

// Elements of an expanded tensor share memory. A distributed expanded tensor must accept exactly
// the in-place operators that libtorch accepts on a plain expanded tensor, and all ranks must throw
// together.

TEST_ON_MESH(ExpandedTensor, IsWrittenLikeOnOneRank, {3}, {"x"}) {
  const std::vector<testing::Named<void(at::Tensor)>> writes{
      {"fill", [](auto x) { x.fill_(7); }},
      {"zero", [](auto x) { x.zero_(); }},
      {"fill_diagonal", [](auto x) { x.fill_diagonal_(3); }},
      {"fill_rows", [](auto x) { x.slice(0, 2, 4).fill_(2); }},
      {"fill_a_column", [](auto x) { x.select(1, 1).fill_(2); }},
      {"fill_the_end_of_a_column", [](auto x) { x.slice(0, 2, 4).select(1, 1).fill_(2); }}};
  const auto value = at::arange(4.0).view({1, 4});
  for (const auto& [name, write] : writes) {
    for (const Placement& placement :
         {Placement(Shard{0}), Placement(Shard{1}), Placement(Partial{}),
          Placement(Partial{ReduceOp::kAvg}), Placement(Partial{ReduceOp::kMax})}) {
      const auto row = distribute_tensor(value, mesh, {placement}).tensor();
      const auto x = row.detach().expand({4, 4}), expected = value.clone().expand({4, 4});
      write(x);
      write(expected);
      EXPECT_EQ(x.sizes(), expected.sizes()) << name;
      EXPECT_EQUAL(x, expected) << name << to_string(placement);
    }
  }
}

TEST_ON_MESH(ExpandedTensor, RefusesOverlappingWritesOnAllRanks, {3}, {"x"}) {
  const auto value = at::arange(4.0).view({1, 4});
  const auto row = distribute_tensor(value, mesh, {Shard{1}}).tensor().detach();
  EXPECT_THROWN(std::exception, row.expand({4, 4}).mul_(2), "refers to a single memory location");
  EXPECT_EQUAL(row, value);
}

// The offset of as_strided() counts from the first element of a distributed tensor or view.

using Change = std::function<at::Tensor(at::Tensor x)>;

/// Calls `change` on a plain and a distributed tensor. Expects the same result and the same writes.
void expect_as_one_rank(const Change& change) {
  auto plain = at::arange(42, at::kDouble).view({6, 7});
  const auto expected = change(plain);
  RunOnMesh({3}, {"x"}, [&](const DeviceMesh& mesh) {
    for (const Placement& placement :
         {Placement(Replicate{}), Placement(Shard{0}), Placement(Shard{1}), Placement(Partial{}),
          Placement(Partial{ReduceOp::kMax})}) {
      const auto x = distribute_tensor(at::arange(42, at::kDouble).view({6, 7}), mesh, {placement});
      const auto found = change(x.tensor().detach());
      EXPECT_EQUAL(found, expected)
          << to_string(placement) << DistributedTensor(found).full_tensor();
      EXPECT_EQUAL(x, plain) << to_string(placement);
    }
  });
}

TEST(AsStrided, CountsItsOffsetFromTheStartOfTheView) {
  expect_as_one_rank([](at::Tensor x) {
    const auto view = x.slice(0, 2);
    return view.as_strided({2}, {1}, view.storage_offset() + 7).clone();
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

// A view along a sharded dimension contains a copy of the viewed elements. Reads and writes of the
// view must use the viewed tensor, not an old copy.

using testing::full_tensor;

at::Tensor split(Rank& rank, const at::Tensor& value, const Placement& placement = Shard{0}) {
  return distribute_tensor(value, rank.mesh({4}, {"x"}), {placement}).tensor().detach();
}

TEST_ON_RANKS(DetachedView, RefusesReadsAfterAWriteToItsBase, 4) {
  auto x = split(rank, values({5, 3}));
  const DistributedTensor h(x.slice(0, 0, 3));
  EXPECT_EQUAL(h, values({5, 3}).slice(0, 0, 3));
  x.add_(1);
  EXPECT_ERROR(h.full_tensor(), "after the viewed tensor was written");
  EXPECT_ERROR(h.to_local(), "after the viewed tensor was written");
  EXPECT_ERROR(h.redistribute({Shard{1}}), "after the viewed tensor was written");
  EXPECT_ERROR(local_tensor(h), "after the viewed tensor was written");
  EXPECT_ERROR(to_string(h), "after the viewed tensor was written");
  EXPECT_EQUAL(x.slice(0, 0, 3), values({5, 3}).slice(0, 0, 3).add(1));
}

// Writes through a view made in an InferenceMode scope, and through a view that a new thread makes.
TEST(DetachedView, WritesAreDifferentiatedInAnyModeAndThread) {
  const auto loss = [](const at::Tensor& h) { return h.pow(2).mul(h).sum(); };
  auto plain = values({7, 3}).requires_grad_();
  const auto expected = plain.mul(1);
  expected.select(0, 5).mul_(3);
  expected.slice(0, 1, 6).mul_(2);
  loss(expected).backward();
  RunRanks(4, [&](Rank& rank) {
    for (const Placement placement : {Placement(Shard{0}), Placement(Shard{1})}) {
      const auto x = split(rank, values({7, 3}), placement).requires_grad_();
      const auto h = x.mul(1);
      {
        const c10::InferenceMode none(false);
        h.select(0, 5).mul_(3);
      }
      std::thread([&] { h.slice(0, 1, 6).mul_(2); }).join();
      loss(h).backward();
      EXPECT_CLOSE(x.grad(), plain.grad());
    }
  });
}

/// Fills rows 1 to 3 of a 5 x 3 tensor of ones by `fill`. Returns the whole tensor.
template <class Fill>
at::Tensor filled(Rank& rank, const Placement& placement, const Fill& fill) {
  manual_seed(1);
  auto x = split(rank, at::ones({5, 3}), placement);
  fill(x.slice(0, 1, 4));
  return full_tensor(x);
}

TEST_ON_RANKS(DetachedView, GetsTheSameRandomNumbersInEveryPlacement, 4) {
  const auto fills = std::vector<void (*)(at::Tensor)>{
      [](at::Tensor h) { h.uniform_(); }, [](at::Tensor h) { h.normal_(1, 2); },
      [](at::Tensor h) { h.bernoulli_(0.5); }, [](at::Tensor h) { h.slice(1, 1, 3).uniform_(); }};
  for (const auto fill : fills) {
    const auto expected = filled(rank, Replicate{}, fill);
    EXPECT_TRUE(at::equal(expected[0], at::ones(3)));
    EXPECT_FALSE(at::equal(expected[1], expected[2]));
    EXPECT_TRUE(at::equal(filled(rank, Shard{0}, fill), expected));
    EXPECT_TRUE(at::equal(filled(rank, Shard{1}, fill), expected));
  }
}

TEST_ON_RANKS(DetachedView, RefusesInferenceTensorsAndSizeChanges, 4) {
  {
    // Inference tensors have no version, so the library can't tell if a view's copy is outdated.
    const c10::InferenceMode inference;
    auto x = split(rank, at::ones(4));
    EXPECT_ERROR(x.slice(0, 0, 3).zero_(), "of an inference tensor");
    EXPECT_ERROR(x.slice(0, 0, 3).slice(0, 1, 2).zero_(), "of an inference tensor");
    EXPECT_ERROR(x.slice(0, 0, 3).uniform_(), "of an inference tensor");
    EXPECT_EQUAL(x, at::ones(4));
    EXPECT_EQUAL(x.slice(0, 0, 3).add(1), at::full({3}, 2.0));
  }
  {
    auto x = split(rank, at::ones(5));
    const auto h = x.slice(0, 0, 3);
    {
      const StrictScope strict;
      EXPECT_ERROR(h.uniform_(), "the strict scope refuses to gather");
    }
    x.add_(1);
    EXPECT_ERROR(h.uniform_(), "after the viewed tensor was written");
    EXPECT_EQUAL(x, at::full({5}, 2.0));
  }
  {
    auto x = split(rank, values({5, 3}));
    EXPECT_ERROR(x.slice(0, 1, 3).resize_({2, 2}), "cannot change the sizes of a view");
    EXPECT_ERROR(x.slice(0, 1, 3).t_(), "cannot change the sizes of a view");
    EXPECT_EQUAL(x, values({5, 3}));
  }
}

TEST(DetachedView, WritesToSeveralPiecesReachTheBase) {
  // Each function writes to a 7 x 4 tensor through several views in turn.
  const std::vector<testing::Named<void(const at::Tensor&)>> all{
      {"chunk",
       [](auto& x) {
         const auto pieces = x.chunk(3);
         pieces[0].mul_(2);
         pieces[2].add_(1);
         pieces[1].copy_(pieces[0] + 1);
         pieces[0].add_(pieces[1]);
       }},
      {"split",
       [](auto& x) {
         for (const at::Tensor& piece : x.split({1, 4, 2})) {
           piece.sub_(piece.sum());
         }
       }},
      {"unbind",
       [](auto& x) {
         const auto rows = x.unbind();
         for (std::size_t i = 0; i < rows.size(); ++i) {
           rows[i].mul_(static_cast<double>(i));
         }
       }},
      {"pieces_of_a_part",
       [](auto& x) {
         const auto pieces = x.slice(0, 1, 6).chunk(2);
         pieces[0].mul_(2);
         pieces[1].mul_(3);
       }},
  };
  RunRanks(4, [&](Rank& rank) {
    for (const auto& pieces : all) {
      for (const Placement placement : {Placement(Shard{0}), Placement(Shard{1})}) {
        const at::Tensor expected = values({7, 4}), x = split(rank, values({7, 4}), placement);
        pieces.run(expected);
        pieces.run(x);
        EXPECT_CLOSE(x, expected) << pieces.name << to_string(placement);
      }
    }
  });
}

TEST_ON_RANKS(DetachedView, PieceIsStaleAfterAWriteToItsBase, 4) {
  const at::Tensor x = split(rank, values({7, 4}));
  const auto pieces = x.chunk(2);
  pieces[0].add_(1);
  x.add_(1);
  EXPECT_ERROR(pieces[1].add_(1), "after the viewed tensor was written");
  const auto again = x.chunk(2);
  const at::Tensor other = x.slice(0, 0, 5);
  again[0].add_(1);
  EXPECT_ERROR(other.add_(1), "after the viewed tensor was written");
  EXPECT_NO_THROW(again[1].add_(1));
}

}  // namespace
}  // namespace tessera
