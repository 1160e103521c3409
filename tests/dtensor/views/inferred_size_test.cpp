// A size of -1 where a tensor has no elements: found from the sizes of the whole, on every rank.

#include "testing/distributed.h"

namespace tessera {
namespace {
namespace inferred_size {

using testing::values;
using Sizes = std::vector<std::int64_t>;

struct View {
  Sizes from, to, expected;
};

const std::vector<View>& views() {
  static const std::vector<View> all{
      {{0, 6, 8}, {0, 6, -1, 4}, {0, 6, 2, 4}},  // heads of no rows
      {{0, 6, 2, 4}, {0, 6, -1}, {0, 6, 8}},     // and back
      {{0, 6, 8}, {0, -1, 2, 4}, {0, 6, 2, 4}},  //
      {{3, 0, 8}, {3, 0, -1, 4}, {3, 0, 2, 4}},  // no tokens
      {{3, 0, 8}, {3, -1, 2, 4}, {3, 0, 2, 4}},  //
      {{0, 6, 8}, {-1, 8}, {0, 8}},              // what libtorch finds, too
      {{0, 6, 8}, {0, 6, -1, 1, 8}, {0, 6, 1, 1, 8}},
  };
  return all;
}

TEST(InferredSize, IsThatOfTheOtherRowsForATensorWithoutElements) {
  const std::vector<std::function<at::Tensor(const at::Tensor&, at::IntArrayRef)>> functions{
      [](auto& x, auto to) { return x.view(to); },
      [](auto& x, auto to) { return x.reshape(to); },
      [](auto& x, auto to) { return at::_unsafe_view(x, to); },
      [](auto& x, auto to) { return at::view_copy(x, to); },
  };
  RunOnMesh({2}, {"tp"}, [&](const DeviceMesh& mesh) {
    for (const View& view : views()) {
      for (std::int64_t dim = 0; dim < std::ssize(view.from); ++dim) {
        for (const auto& function : functions) {
          const at::Tensor x = distribute_tensor(values(view.from), mesh, {Shard{dim}}).tensor();
          const at::Tensor leaf = x.detach().requires_grad_();
          const at::Tensor y = function(leaf * 2, view.to);
          EXPECT_EQ(y.sizes(), view.expected);
          y.sum().backward();
          EXPECT_EQ(leaf.grad().sizes(), view.from);
        }
      }
    }
  });
}

TEST(InferredSize, KeepsHeadsWhereTheyAre) {
  RunRanks(2, [](Rank& rank) {
    const StrictScope nothing_moves;
    const auto q = distribute_tensor(values({0, 6, 8}), rank.mesh({2}, {"tp"}), {Shard{2}});
    const at::Tensor heads = q.tensor().view({0, 6, -1, 4});
    EXPECT_EQ(DistributedTensor(heads).placements(), Placements{Shard{2}});
    EXPECT_EQ(local_tensor(heads).sizes(), (Sizes{0, 6, 1, 4}));
    EXPECT_EQ(DistributedTensor(heads.reshape({0, 6, -1})).placements(), Placements{Shard{2}});
    EXPECT_EQ(q.tensor().unflatten(-1, {-1, 4}).sizes(), (Sizes{0, 6, 2, 4}));
  });
}

TEST(InferredSize, IsThatOfTheWholeForAnEmptyShard) {
  RunOnMesh({4}, {"dp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(values({2, 6, 8}), mesh, {Shard{0}});
    EXPECT_EQ(local_tensor(x).size(0), rank.rank() < 2 ? 1 : 0);
    const at::Tensor y = x.view({2, 6, -1, 4}), z = x.reshape({-1, 6, 2, 4});
    EXPECT_EQ(local_tensor(y).sizes(), (Sizes{rank.rank() < 2 ? 1 : 0, 6, 2, 4}));
    EXPECT_TRUE(at::equal(testing::full_tensor(y), values({2, 6, 2, 4})));
    EXPECT_TRUE(at::equal(testing::full_tensor(z), values({2, 6, 2, 4})));
  });
}

TEST(InferredSize, IsRefusedWhereItCouldBeAny) {
  RunRanks(2, [](Rank& rank) {
    const at::Tensor x = distribute_tensor(values({2, 0, 8}), rank.mesh({2}, {"tp"}), {Shard{2}});
    EXPECT_THROWN(c10::Error, x.view({0, -1}), "cannot reshape tensor of 0 elements");
    EXPECT_THROWN(c10::Error, x.reshape({0, -1}), "cannot reshape tensor of 0 elements");
    EXPECT_THROWN(c10::Error, x.view({2, -1, -1}), "only one dimension can be inferred");
    EXPECT_THROWN(c10::Error, x.view({2, 0, 3, -2}), "invalid shape dimension -2");
  });
}

}  // namespace inferred_size
}  // namespace
}  // namespace tessera
