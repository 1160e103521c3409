// The example in tessera/tensor_parallel/parallelize.h: a style of one's own.

#include "tessera/nn/child.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

class Scale : public nn::Module<Scale> {
 public:
  Scale() { weight = register_slot("weight", at::arange(6).to(at::kFloat)); }
  at::Tensor forward(const at::Tensor& x) { return x * weight; }

  nn::Parameter weight;
};

struct Model : nn::Module<Model> {
  at::Tensor forward(const at::Tensor& x) { return (*scale)(x); }

  nn::Child<Scale> scale{*this, "scale"};
};

class ShardedScale final : public tensor_parallel::ParallelStyle {
 public:
  std::string name() const override { return "sharded_scale"; }
  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const override {
    return {{module.slot("weight"), Shard{0}}};
  }
  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    module.add_forward_pre_hook([mesh](nn::ModuleBase&, nn::TensorList inputs) {
      *inputs[0] = distribute_tensor(*inputs[0], mesh, {Shard{-1}}).tensor();
    });
  }
};

TEST(ParallelStyleExample, ShardsAScale) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    Model model;
    tensor_parallel::parallelize_module(model, mesh["tp"],
                                        {{"scale", std::make_shared<ShardedScale>()}});
    const DistributedTensor y(model(at::ones({4, 6})));
    EXPECT_EQ(y.placements(), Placements{Shard{1}});
    EXPECT_TRUE(y.full_tensor().equal(at::arange(6).to(at::kFloat).expand({4, 6})));
  });
}

}  // namespace
}  // namespace tessera
