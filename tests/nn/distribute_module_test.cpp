#include "tessera/nn/distribute_module.h"
#include "nn/layers_of_each_kind.h"
#include "testing/distributed.h"

namespace tessera::nn {
namespace {

std::shared_ptr<testing::LayersOfEachKind> initialized() {
  auto model = std::make_shared<testing::LayersOfEachKind>();
  init_weights(*model, 1);
  return model;
}

const at::Tensor& tokens() {
  static const auto all = at::tensor({3, 0, 6, 1, 1}, at::kLong);
  return all;
}

/// Splits the last linear; the rest is left alone.
void partition(const std::string& name, ModuleBase& module, const DeviceMesh& mesh) {
  if (name == "out") {
    distribute_parameter(*module.slot("weight"), mesh, {Shard{0}});
  }
}

void distribute_input(TensorList tensors, const DeviceMesh& mesh) {
  *tensors[0] = distribute_tensor(*tensors[0], mesh, {Replicate{}});
}

void gather_output(TensorList tensors, const DeviceMesh&) {
  *tensors[0] = DistributedTensor(*tensors[0]).full_tensor();
}

TEST(DistributeModule, ComputesWhatThePlainModuleDoes) {
  const auto plain = initialized();
  const auto expected = (*plain)(tokens());
  expected.pow(2).sum().backward();
  RunOnMesh({4}, {"tp"}, [&](const DeviceMesh& mesh) {
    const auto model = initialized();
    distribute_module(*model, mesh, &partition, &distribute_input, &gather_output);
    const auto found = (*model)(tokens());
    EXPECT_FALSE(tessera::is_distributed(found));
    EXPECT_TRUE(at::allclose(found, expected));
    found.pow(2).sum().backward();
    const auto slots = model->named_slots(), originals = plain->named_slots();
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const DistributedTensor gradient(slots[i].second->get().grad());
      EXPECT_TRUE(
          at::allclose(gradient.full_tensor(), originals[i].second->get().grad(), 1e-4, 1e-6))
          << slots[i].first;
    }
  });
}

TEST(DistributeModule, ReplicatesTheRemainingParameters) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    const auto model = initialized();
    std::vector<std::string> visited;
    distribute_module(*model, mesh, [&](const std::string& name, ModuleBase& module, auto& on) {
      visited.push_back(name);
      partition(name, module, on);
    });
    EXPECT_EQ(visited, (std::vector<std::string>{"", "embed", "layers", "layers.0", "layers.1",
                                                 "norm", "out"}));
    EXPECT_EQ(DistributedTensor(*model->out->weight).placements(), Placements{Shard{0}});
    EXPECT_EQ(DistributedTensor(*model->norm->weight).placements(), Placements{Replicate{}});
    EXPECT_EQ(DistributedTensor(*model->table).placements(), Placements{Replicate{}});
    EXPECT_TRUE(model->norm->weight->requires_grad());
    EXPECT_FALSE(model->table->requires_grad());
  });
}

TEST(DistributeModule, RefusesToDistributeTwice) {
  RunOnMesh({1}, {"tp"}, [](const DeviceMesh& mesh) {
    const auto model = initialized();
    distribute_module(*model, mesh);
    EXPECT_ERROR(distribute_module(*model, mesh), "already");
  });
}

}  // namespace
}  // namespace tessera::nn
