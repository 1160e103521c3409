#include <torch/csrc/autograd/custom_function.h>

#include "tessera/dtensor/detail/parameter_name.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::counting_values;

DeviceMesh one_rank() {
  return init_device_mesh(comm::fake_world(0, 1), {1}, {"x"});
}

TEST(Wrapper, ShowsGlobalSizes) {
  const auto mesh = init_device_mesh(comm::fake_world(1, 4), {4}, {"x"});
  const auto t = DistributedTensor::from_local(at::zeros({3, 2}), mesh, {Shard{0}});
  EXPECT_EQ(t.tensor().sizes(), (std::vector<std::int64_t>{12, 2}));
  EXPECT_EQ(t.tensor().strides(), (std::vector<std::int64_t>{2, 1}));
  EXPECT_FALSE(t.tensor().has_storage());
}

TEST(Wrapper, KeepsTheStrideOrderOfItsPart) {
  const auto mesh = init_device_mesh(comm::fake_world(0, 2), {2}, {"x"});
  const auto t = DistributedTensor::from_local(at::zeros({3, 2}).t(), mesh, {Shard{0}});
  EXPECT_EQ(t.tensor().strides(), (std::vector<std::int64_t>{1, 4}));
}

TEST(Wrapper, RefusesDataPointers) {
  const auto t = distribute_tensor(at::zeros({2}), one_rank(), {Replicate{}});
  EXPECT_THROWN(c10::Error, t.tensor().data_ptr(),
                "the memory of a distributed tensor was asked for");
  EXPECT_THROWN(c10::Error, t.tensor().storage(),
                "Cannot access storage of a tessera::DistributedTensor");
}

/// Reads memory where it was asked to.
struct ReadsMemory : torch::autograd::Function<ReadsMemory> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            bool in_backward) {
    context->save_for_backward({x});
    if (!in_backward) {
      (void)x.const_data_ptr();
    }
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    (void)context->get_saved_variables()[0].const_data_ptr();
    return {gradients[0] * 2, {}};
  }
};

TEST(Wrapper, SaysWhichFunctionAskedForItsMemory) {
  const at::Tensor x = distribute_tensor(at::zeros({2, 3}), one_rank(), {Shard{0}}).tensor();
  x.requires_grad_();
  detail::name_parameter(x, "layer.weight");
  EXPECT_THROWN(c10::Error, ReadsMemory::apply(x, false), "asked for, which it lacks",
                "'layer.weight', [2, 3] on (x=1) as [Shard(0)]", "by local_map");
  EXPECT_THROWN(c10::Error, ReadsMemory::apply(x, true).sum().backward(),
                "was asked for in the backward of tessera::", "ReadsMemory, which it lacks");
}

TEST(Wrapper, SharesMemoryOnlyIfReplicated) {
  testing::RunRanks(2, [](testing::Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2}, {"x"});
    const at::Tensor source = at::zeros({4});
    const auto all = distribute_tensor(source, mesh, {Replicate{}});
    const auto part = distribute_tensor(source, mesh, {Shard{0}});
    const auto copy = distribute_tensor(source.clone(), mesh, {Replicate{}});
    source.add_(1);
    EXPECT_EQ(all.to_local()[0].item<float>(), 1);
    EXPECT_EQ(part.to_local()[0].item<float>(), 0);
    EXPECT_EQ(copy.to_local()[0].item<float>(), 0);
    const auto alone = distribute_tensor(source, one_rank(), {Shard{0}});
    source.add_(1);
    EXPECT_EQ(alone.to_local()[0].item<float>(), 1);
  });
}

TEST(Wrapper, SharesItsVersionWithItsPart) {
  const auto local = at::zeros({2});
  const auto t = DistributedTensor::from_local(local, one_rank(), {Replicate{}});
  const auto before = t.tensor()._version();
  local.add_(1);
  EXPECT_EQ(t.tensor()._version(), before + 1);
  t.tensor().add_(1);
  EXPECT_EQ(local._version(), before + 2);
  EXPECT_EQ(local[0].item<float>(), 2);
}

TEST(Wrapper, NoticesAWriteToItsPartUnderASavedTensor) {
  const auto t = distribute_tensor(counting_values({2, 2}), one_rank(), {Replicate{}});
  const at::Tensor leaf = t.tensor().detach().requires_grad_();
  const auto loss = leaf.mul(leaf).sum();
  local_tensor(leaf).add_(1);
  EXPECT_THROWN(c10::Error, loss.backward(), "modified by an inplace operation");
}

TEST(SetData, RefusesPlainForDistributedAndBack) {
  const auto t = distribute_tensor(at::zeros({2}), one_rank(), {Replicate{}});
  at::Tensor ours = t, plain = at::zeros({2});
  EXPECT_ERROR(ours.set_data(plain), "set_data");
  EXPECT_ERROR(plain.set_data(ours), "set_data");
  EXPECT_EQ(at::add(plain, 1)[0].item<float>(), 1);
}

TEST(SetData, TakesAnotherDistributedTensor) {
  at::Tensor a = distribute_tensor(at::zeros({2}), one_rank(), {Replicate{}});
  at::Tensor b = distribute_tensor(at::ones({3}), one_rank(), {Replicate{}});
  a.set_data(b);
  EXPECT_EQ(a.numel(), 3);
  EXPECT_TRUE(at::equal(local_tensor(a), at::ones({3})));
}

TEST(SetData, TakesTheTypeToo) {
  const auto t = distribute_tensor(counting_values({2, 3}), one_rank(), {Shard{0}});
  at::Tensor leaf = t.tensor().detach().requires_grad_();
  leaf.set_data(leaf.to(at::kDouble));
  EXPECT_EQ(leaf.scalar_type(), at::kDouble);
  EXPECT_EQ(local_tensor(leaf).scalar_type(), at::kDouble);
  leaf.square().sum().backward();
  EXPECT_TRUE(local_tensor(leaf.grad()).equal(counting_values({2, 3}).to(at::kDouble).mul(2)));
}

TEST(FromLocal, NamesWhatDoesNotFit) {
  const auto mesh = init_device_mesh(comm::fake_world(0, 2), {2}, {"x"});
  EXPECT_ERROR(DistributedTensor::from_local(at::zeros({3}), mesh, {Shard{0}}, {{7}}),
               "of a tensor of [7]");
  EXPECT_ERROR(DistributedTensor::from_local(at::zeros({3}), mesh, {Shard{1}}),
               "Shard(1) of a tensor of 1 dimensions");
  EXPECT_ERROR(DistributedTensor::from_local(at::zeros({3}), mesh, {}), "0 placements for");
}

TEST(OneRank, OperatorsAndBackwardRun) {
  const auto mesh = one_rank();
  const at::Tensor x = distribute_tensor(counting_values({4, 6}), mesh, {Shard{0}});
  const at::Tensor w = distribute_tensor(counting_values({6, 5}).div(10), mesh, {Shard{1}})
                           .tensor()
                           .requires_grad_();
  const auto y = at::silu(at::mm(x, w)).view({20}).pow(2).mean();
  y.backward();
  auto plain = counting_values({6, 5}).div(10).requires_grad_();
  at::silu(at::mm(counting_values({4, 6}), plain)).view({20}).pow(2).mean().backward();
  EXPECT_TRUE(at::allclose(local_tensor(w.grad()), plain.grad()));
  EXPECT_EQ(DistributedTensor(w.grad()).placements(), Placements{Shard{1}});
}

}  // namespace
}  // namespace tessera
