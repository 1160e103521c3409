// Views of a dimension that is split: they hold a copy of what they view, which no reader and no
// writer may mistake for the viewed tensor itself.

#include <c10/core/InferenceMode.h>

#include <thread>

#include "tessera/dtensor/random.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::full_tensor;
using testing::values;

at::Tensor split(Rank& rank, const at::Tensor& value, const Placement& placement = Shard{0}) {
  return distribute_tensor(value, rank.mesh({4}, {"x"}), {placement}).tensor().detach();
}

// Inference tensors count no versions, so that a later read of the view could not tell.
TEST(DetachedView, InInferenceModeRefusesAWrite) {
  RunRanks(4, [](Rank& rank) {
    const c10::InferenceMode inference;
    auto x = split(rank, at::ones(4));
    EXPECT_ERROR(x.slice(0, 0, 3).zero_(), "of an inference tensor");
    EXPECT_ERROR(x.slice(0, 0, 3).slice(0, 1, 2).zero_(), "of an inference tensor");
    EXPECT_ERROR(x.slice(0, 0, 3).uniform_(), "of an inference tensor");
    EXPECT_TRUE(at::equal(full_tensor(x), at::ones(4)));
    EXPECT_TRUE(at::equal(full_tensor(x.slice(0, 0, 3).add(1)), at::full({3}, 2.0)));
  });
}

TEST(DetachedView, RefusesReadsAfterAWriteToItsBase) {
  RunRanks(4, [](Rank& rank) {
    auto x = split(rank, values({5, 3}));
    const DistributedTensor h(x.slice(0, 0, 3));
    EXPECT_TRUE(at::equal(h.full_tensor(), values({5, 3}).slice(0, 0, 3)));
    x.add_(1);
    EXPECT_ERROR(h.full_tensor(), "after the viewed tensor was written");
    EXPECT_ERROR(h.to_local(), "after the viewed tensor was written");
    EXPECT_ERROR(h.redistribute({Shard{1}}), "after the viewed tensor was written");
    EXPECT_ERROR(h.redistribute({Shard{1}}, {.async = true}),
                 "after the viewed tensor was written");
    EXPECT_ERROR(local_tensor(h), "after the viewed tensor was written");
    EXPECT_ERROR(to_string(h), "after the viewed tensor was written");
    EXPECT_TRUE(at::equal(full_tensor(x.slice(0, 0, 3)), values({5, 3}).slice(0, 0, 3).add(1)));
  });
}

// The first view that a thread makes, or that is made under a guard of libtorch's.
TEST(DetachedView, IsDifferentiatedWhereverItIsMade) {
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
      EXPECT_TRUE(at::allclose(full_tensor(x.grad()), plain.grad()));
    }
  });
}

TEST(DetachedView, GivesItsLocalTensorAsACopy) {
  RunRanks(4, [](Rank& rank) {
    auto x = split(rank, at::zeros(5));
    const auto h = x.slice(0, 0, 3);
    DistributedTensor(h).to_local().add_(1);
    full_tensor(h).add_(1);
    EXPECT_TRUE(at::equal(full_tensor(h), at::zeros(3)));
    EXPECT_TRUE(at::equal(full_tensor(x), at::zeros(5)));
    h.add_(2);
    EXPECT_TRUE(at::equal(full_tensor(x), at::tensor({2.0F, 2.0F, 2.0F, 0.0F, 0.0F})));
  });
}

TEST(DetachedView, SendsTheGradientOfItsLocalTensorBack) {
  RunRanks(4, [](Rank& rank) {
    const auto x = split(rank, values({5, 3})).requires_grad_();
    DistributedTensor(x.slice(0, 1, 4)).to_local().pow(2).sum().backward();
    auto expected = at::zeros({5, 3}, at::kDouble);
    expected.slice(0, 1, 4).copy_(values({5, 3}).slice(0, 1, 4).mul(2));
    EXPECT_TRUE(at::allclose(full_tensor(x.grad()), expected));
  });
}

/// x of ones, three of its rows filled by `fill`.
template <class Fill>
at::Tensor filled(Rank& rank, const Placement& placement, const Fill& fill) {
  manual_seed(1);
  auto x = split(rank, at::ones({5, 3}), placement);
  fill(x.slice(0, 1, 4));
  return full_tensor(x);
}

TEST(DetachedView, IsFilledWithTheNumbersOfItsElements) {
  const auto fills = std::vector<void (*)(at::Tensor)>{
      [](at::Tensor h) { h.uniform_(); }, [](at::Tensor h) { h.normal_(1, 2); },
      [](at::Tensor h) { h.bernoulli_(0.5); }, [](at::Tensor h) { h.slice(1, 1, 3).uniform_(); }};
  RunRanks(4, [&](Rank& rank) {
    for (const auto fill : fills) {
      const auto expected = filled(rank, Replicate{}, fill);
      EXPECT_TRUE(at::equal(expected[0], at::ones(3)));
      EXPECT_FALSE(at::equal(expected[1], expected[2]));
      EXPECT_TRUE(at::equal(filled(rank, Shard{0}, fill), expected));
      EXPECT_TRUE(at::equal(filled(rank, Shard{1}, fill), expected));
    }
  });
}

TEST(DetachedView, RefusesRandomFillsWhenStaleOrStrict) {
  RunRanks(4, [](Rank& rank) {
    auto x = split(rank, at::ones(5));
    const auto h = x.slice(0, 0, 3);
    {
      const StrictScope strict;
      EXPECT_ERROR(h.uniform_(), "the strict scope refuses that");
    }
    x.add_(1);
    EXPECT_ERROR(h.uniform_(), "after the viewed tensor was written");
    EXPECT_TRUE(at::equal(full_tensor(x), at::full({5}, 2.0)));
  });
}

TEST(DetachedView, IsWrittenThroughAfterInPlaceShapeChanges) {
  const auto reshapes = {+[](at::Tensor h) { h.unsqueeze_(0); }, +[](at::Tensor h) { h.t_(); },
                         +[](at::Tensor h) { h.transpose_(0, 1).unsqueeze_(1).squeeze_(); }};
  RunRanks(4, [&](Rank& rank) {
    for (const auto reshape : reshapes) {
      auto x = split(rank, values({5, 3})), expected = values({5, 3});
      for (const auto& tensor : {x, expected}) {
        auto h = tensor.slice(0, 1, 3);
        reshape(h);
        h.select(-1, 0).add_(1);
        h.mul_(2);
        h.select(0, 0).zero_();
      }
      EXPECT_TRUE(at::equal(full_tensor(x), expected));
    }
  });
}

TEST(DetachedView, IsStaleAfterAWriteDespiteInPlaceShapeChanges) {
  RunRanks(4, [](Rank& rank) {
    auto x = split(rank, values({5, 3}));
    auto h = x.slice(0, 1, 3);
    h.t_();
    EXPECT_TRUE(at::equal(full_tensor(h), values({5, 3}).slice(0, 1, 3).t()));
    x.add_(1);
    EXPECT_ERROR(full_tensor(h), "after the viewed tensor was written");
    EXPECT_ERROR(h.add_(1), "after the viewed tensor was written");
  });
}

TEST(DetachedView, RefusesInPlaceResizes) {
  RunRanks(4, [](Rank& rank) {
    auto x = split(rank, values({5, 3}));
    EXPECT_ERROR(x.slice(0, 1, 3).resize_({2, 2}),
                 "changes the sizes of a view that had to be gathered");
    EXPECT_ERROR(x.slice(0, 1, 3).as_strided_({2}, {1}),
                 "changes the sizes of a view that had to be gathered");
    EXPECT_TRUE(at::equal(full_tensor(x), values({5, 3})));
  });
}

/// x of 7 x 4 whose pieces are written one after the other.
struct Pieces {
  const char* name;
  void (*write)(const at::Tensor& x);
};

TEST(DetachedView, WritesToSeveralPiecesAllArrive) {
  const std::vector<Pieces> all{
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
      {"columns",
       [](auto& x) {
         const auto halves = x.chunk(2, 1);
         halves[0].zero_();
         halves[1].add_(3);
       }},
      {"pieces_of_a_part",
       [](auto& x) {
         const auto pieces = x.slice(0, 1, 6).chunk(2);
         pieces[0].mul_(2);
         pieces[1].mul_(3);
       }},
      {"a_piece_of_changed_sizes",
       [](auto& x) {
         auto pieces = x.chunk(2);
         pieces[0].mul_(2);
         pieces[1].unsqueeze_(0).add_(3);
         pieces[0].add_(4);
       }},
  };
  RunRanks(4, [&](Rank& rank) {
    for (const Pieces& pieces : all) {
      for (const Placement placement : {Placement(Shard{0}), Placement(Shard{1})}) {
        const at::Tensor expected = values({7, 4}), x = split(rank, values({7, 4}), placement);
        pieces.write(expected);
        pieces.write(x);
        EXPECT_TRUE(at::allclose(full_tensor(x), expected)) << pieces.name << to_string(placement);
      }
    }
  });
}

TEST(DetachedView, APieceIsStaleOnceItsBaseIsWritten) {
  RunRanks(4, [](Rank& rank) {
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
  });
}

}  // namespace
}  // namespace tessera
