// What the operators on lists write is counted as libtorch counts it, and is what one position
// after another would write.

#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::full_tensor;
using testing::values;
using Tensors = std::vector<at::Tensor>;

const std::vector<Placement> kPlacementsInLists{Replicate{}, Shard{0}, Partial{},
                                                Partial{ReduceOp::kMax}};

/// Each writes to its first list.
const std::vector<testing::Named<void(Tensors, Tensors)>>& list_writes() {
  static const std::vector<testing::Named<void(Tensors, Tensors)>> all{
      {"add", [](auto x, auto y) { at::_foreach_add_(x, y); }},
      {"add_number", [](auto x, auto) { at::_foreach_add_(x, 2.0); }},
      {"add_numbers",
       [](auto x, auto) { at::_foreach_add_(x, at::ArrayRef<at::Scalar>({1, 2.0})); }},
      {"mul", [](auto x, auto y) { at::_foreach_mul_(x, y); }},
      {"sqrt", [](auto x, auto) { at::_foreach_sqrt_(x); }},
      {"neg", [](auto x, auto) { at::_foreach_neg_(x); }},
      {"zero", [](auto x, auto) { at::_foreach_zero_(x); }},
      {"copy", [](auto x, auto y) { at::_foreach_copy_(x, y); }},
      {"addcmul", [](auto x, auto y) { at::_foreach_addcmul_(x, y, y, 0.5); }}};
  return all;
}

TEST_ON_MESH(ForeachInPlace, CountsItsWritesAsLibtorchDoes, {3}, {"x"}) {
  const auto spread = [&](const at::Tensor& value, const Placement& placement) -> at::Tensor {
    return distribute_tensor(value, mesh, {placement}).tensor().detach();
  };
  for (const auto& [name, run] : list_writes()) {
    const Tensors plain{values({5}).abs(), values({3, 2}).abs()};
    run(plain, {values({5}, 1), values({3, 2}, 1)});
    for (const auto& written : kPlacementsInLists) {
      for (const auto& read : kPlacementsInLists) {
        SCOPED_TRACE(name + to_string(written) + to_string(read));
        const Tensors x{spread(values({5}).abs(), written), spread(values({3, 2}).abs(), written)};
        const Tensors y{spread(values({5}, 1), read), spread(values({3, 2}, 1), read)};
        for (int times : {1, 2}) {  // the second time from the cache
          Tensors again{x[0].clone(), x[1].clone()};
          const auto before = again[0]._version();
          run(again, y);
          for (std::size_t i = 0; i < again.size(); ++i) {
            EXPECT_EQ(again[i]._version() - before, 1) << times;
            EXPECT_EQ(local_tensor(again[i])._version(), again[i]._version());
            EXPECT_CLOSE(again[i], plain[i]);
          }
          EXPECT_EQ(y[0]._version(), 0);
        }
      }
    }
  }
}

TEST(Foreach, GradientsOfViewsFollowAWriteToWhatTheyView) {
  const auto run = [](const at::Tensor& written, const at::Tensor& leaf) {
    auto base = written.mul(0);
    const auto column = base.select(1, 3);
    const auto turned = base.t();
    at::_foreach_add_(Tensors{base}, Tensors{leaf});
    (base.sum() + column.sum() * 2 + turned.sum() * 3).backward();
  };
  const auto plain = values({3, 4}, 1).requires_grad_();
  run(values({3, 4}), plain);
  RunOnMesh({3}, {"x"}, [&](const DeviceMesh& mesh) {
    const auto leaf = distribute_tensor(plain.detach(), mesh, {Shard{1}}).tensor().detach();
    run(distribute_tensor(values({3, 4}), mesh, {Shard{0}}), leaf.requires_grad_());
    EXPECT_CLOSE(leaf.grad(), plain.grad());
  });
}

TEST_ON_MESH(Foreach, AGatheredViewIsNotReadAfterAWriteToWhatItViews, {3}, {"x"}) {
  const auto write_and_read = [&](const auto& write) {
    const at::Tensor x = distribute_tensor(values({5}), mesh, {Shard{0}});
    const auto view = x.slice(0, 0, 2);
    write(x);
    EXPECT_ERROR(view.add(1), "after the viewed tensor was written");
    EXPECT_NO_THROW(x.slice(0, 0, 2).add(1));
  };
  write_and_read([](const at::Tensor& x) { at::_foreach_zero_({x}); });
  write_and_read([&](const at::Tensor& x) {
    at::_foreach_copy_({x}, {distribute_tensor(values({5}, 1), mesh, {Partial{}}).tensor()});
  });
}

TEST_ON_MESH(Foreach, AGatheredViewIsWrittenThroughAndCanBeReadAfterwards, {3}, {"x"}) {
  const at::Tensor x = distribute_tensor(at::zeros(5), mesh, {Shard{0}}).tensor().detach();
  const auto view = x.slice(0, 0, 2), other = x.slice(0, 1, 3);
  at::_foreach_add_({view}, 2.0);
  EXPECT_EQUAL(view, at::full({2}, 2.0F));
  EXPECT_EQUAL(x, at::tensor({2.0F, 2.0F, 0.0F, 0.0F, 0.0F}));
  EXPECT_ERROR(other.add(1), "after the viewed tensor was written");
  EXPECT_ERROR(at::_foreach_mul_({x.slice(0, 0, 3), x.slice(0, 1, 4)}, 2.0),
               "after the viewed tensor was written");
}

TEST(Foreach, ATensorListedTwiceIsWrittenTwice) {
  const auto run = [](const Tensors& t) {
    at::_foreach_mul_({t[0], t[0]}, 2.0);
    at::_foreach_add_({t[0], t[1], t[0]}, at::ArrayRef<at::Scalar>({1.0, 2.0, 3.0}));
    at::_foreach_add_({t[0], t[1]}, {t[1], t[0]});
    at::_foreach_addcmul_({t[0], t[0]}, {t[1], t[1]}, {t[1], t[0]}, at::tensor({2.0, 3.0}));
    at::_foreach_mul_({t[0], t[0].t()}, {t[1], t[1]});
  };
  const Tensors plain{values({3, 3}), values({3, 3}, 1)};
  run(plain);
  RunOnMesh({3}, {"x"}, [&](const DeviceMesh& mesh) {
    const ReplicationScope of_the_factors;
    for (const auto& first : kPlacementsInLists) {
      for (const auto& second : kPlacementsInLists) {
        const Tensors t{distribute_tensor(values({3, 3}), mesh, {first}).tensor().detach(),
                        distribute_tensor(values({3, 3}, 1), mesh, {second}).tensor().detach()};
        run(t);
        EXPECT_CLOSE(t[0], plain[0]) << to_string(first) << to_string(second);
        EXPECT_CLOSE(t[1], plain[1]) << to_string(first) << to_string(second);
        EXPECT_EQ(DistributedTensor(t[0]).placements(), Placements{first});
      }
    }
  });
}

TEST_ON_MESH(Foreach, IsOneCallWhereNoPositionWritesWhatAnotherOneUses, {2}, {"x"}) {
  const auto pending = [&]() -> at::Tensor {
    return distribute_tensor(values({4}).abs(), mesh, {Partial{}}).tensor().detach();
  };
  const auto redistributions_of_roots = [](const Tensors& tensors) {
    const auto before = implicit_redistributions();
    at::_foreach_sqrt_(tensors);
    return implicit_redistributions() - before;
  };
  const auto x = pending(), y = pending();
  EXPECT_EQ(redistributions_of_roots({x, y}), 1);
  EXPECT_EQ(redistributions_of_roots({x, x}), 2);
}

TEST_ON_MESH(Foreach, AWriteToWhatBackwardNeedsIsAnError, {3}, {"x"}) {
  const auto x = distribute_tensor(values({5}), mesh, {Shard{0}}).tensor().detach();
  const auto y = x.requires_grad_().exp();
  {
    const at::NoGradGuard guard;
    at::_foreach_mul_({y}, 2.0);
  }
  EXPECT_THROWN(c10::Error, y.sum().backward(), "modified by an inplace operation");
}

}  // namespace
}  // namespace tessera
