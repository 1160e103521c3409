// Adapters under tensor parallelism and FSDP. The oracle is one rank.
#include "tessera/nn/lora.h"

#include "tessera/dtensor/manual_seed.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/child.h"
#include "tessera/nn/fused_linear.h"
#include "tessera/nn/initialization.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/optimizer.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::tensor_parallel {
namespace {

using testing::full_tensor;
using testing::uniform_values;

constexpr std::int64_t kLoraRows = 8;
const nn::LoraOptions kAdapters{
    .rank = 3, .alpha = 6, .targets = {"gate_up", "down"}, .dropout = 0.25};

/// A fused Linear and one back, with adapters; 10 and 6 features, which 3 ranks or 4 don't divide.
struct AdaptedBlock final : nn::Module<AdaptedBlock> {
  at::Tensor forward(const at::Tensor& x) {
    const std::vector<at::Tensor> parts = gate_up->split((*gate_up)(x));
    return (*head)((*down)(at::gelu(parts[0]) * parts[1]));
  }
  nn::Child<nn::FusedLinear> gate_up{*this, "gate_up", 6,
                                     std::vector<nn::FusedPart>{{"gate", 10}, {"up", 10}}};
  nn::Child<nn::Linear> down{*this, "down", 10, 6}, head{*this, "head", 6, 5};
};

/// Adapters that do something.
void fill_adapters(nn::ModuleBase& model) {
  const c10::NoGradGuard no_grad;
  for (const auto& [name, slot] : nn::lora_slots(model)) {
    const at::Tensor& to = slot->persistent();
    const at::Tensor values = uniform_values(to.sizes(), static_cast<double>(name.size()), 0.4);
    if (!tessera::is_distributed(to)) {
      to.copy_(values);
      continue;
    }
    const ShardingSpec& spec = sharding_spec(to);
    const DistributedTensor whole(make_distributed(
        values, {spec.mesh, Layout::replicated(spec.layout->mesh_sizes(), 2)}, to.sizes().vec()));
    local_tensor(to).copy_(local_tensor(whole.redistribute(spec.layout)));
  }
}

/// Two steps on this rank's rows; the adapters' values afterwards, whole.
std::vector<at::Tensor> train(AdaptedBlock& model, std::int64_t part, std::int64_t parts) {
  manual_seed(11);
  optim::Sgd optimizer(model, {.lr = 0.5});
  for (int step = 0; step < 2; ++step) {
    const at::Tensor batch = uniform_values({kLoraRows, 6}, 0.1 + step);
    model(batch.chunk(parts)[static_cast<std::size_t>(part)]).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  std::vector<at::Tensor> values;
  for (const auto& [name, slot] : nn::lora_slots(model)) {
    values.push_back(full_tensor(slot->persistent()).clone());
  }
  return values;
}

std::shared_ptr<AdaptedBlock> adapted_on(const DeviceMesh& mesh) {
  const auto model = testing::made_on_meta<AdaptedBlock>();
  nn::apply_lora(*model, kAdapters);
  parallelize_module(*model, mesh["tp"],
                     {{"gate_up", fused_colwise_parallel({.use_local_output = false})},
                      {"down", rowwise_parallel({.use_local_output = false})},
                      {"head", colwise_parallel({.output_layouts = Replicate{}})}});
  fsdp::fully_shard(*model, mesh["dp"]);
  nn::to_empty(*model, at::kCPU);
  nn::init_weights(*model, 5);
  return model;
}

class LoraOnAMesh : public ::testing::TestWithParam<std::vector<std::int64_t>> {};

TEST_P(LoraOnAMesh, StartsTrainsAndMergesAsOneRank) {
  at::Tensor initial, merged;
  std::vector<at::Tensor> expected;
  // On one rank, where FSDP only says that dropout draws by the element.
  RunRanks(1, [&](Rank& rank) {
    AdaptedBlock alone;
    nn::apply_lora(alone, kAdapters);
    fsdp::fully_shard(alone, rank.mesh({1}, {"dp"}));
    nn::init_weights(alone, 5);
    initial = testing::parameter_values(alone);
    fill_adapters(alone);
    expected = train(alone, 0, 1);
    nn::merge_lora(alone);
    merged = testing::parameter_values(alone);
  });
  const std::vector<std::int64_t> sizes = GetParam();
  RunOnMesh(sizes, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
    const StrictScope strict;
    const auto model = adapted_on(mesh);
    EXPECT_TRUE(at::equal(testing::parameter_values(*model), initial));
    fill_adapters(*model);
    const std::vector<at::Tensor> values = train(*model, mesh.local_rank("dp"), sizes[0]);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(values[i].allclose(expected[i], 1e-4, 1e-5)) << i;
    }
    for (const auto& [name, slot] : model->named_slots()) {
      EXPECT_FALSE(slot->persistent().grad().defined()) << name;
    }
    nn::merge_lora(*model);
    EXPECT_TRUE(testing::parameter_values(*model).allclose(merged, 1e-4, 1e-5));
  });
}

INSTANTIATE_TEST_SUITE_P(
    , LoraOnAMesh,
    ::testing::Values(std::vector<std::int64_t>{2, 2}, std::vector<std::int64_t>{1, 4},
                      std::vector<std::int64_t>{1, 3}, std::vector<std::int64_t>{4, 1}),
    [](const auto& info) {
      return "Dp" + std::to_string(info.param[0]) + "Tp" + std::to_string(info.param[1]);
    });

TEST(LoraOnARank, SendsNoGradientsOfFrozenWeightsAndIsMadeBeforeSharding) {
  RunOnMesh({2, 1}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const auto model = adapted_on(mesh);
    const comm::TrafficTable before = rank.world()->traffic().table();
    (*model)(uniform_values({2, 6}, 0.2)).sum().backward();
    const comm::TrafficTable traffic = rank.world()->traffic().since(before);
    // A and B of gate_up, then of down, in rows for 2 ranks: 2 of 6, 10 of 3; 2 of 10, 3 of 3. Each
    // shard has a multiple of 64 bytes, 16 numbers.
    EXPECT_EQ(traffic.at({"dp", "reduce_scatter"}).bytes, 4 * 2 * (16 + 32 + 32 + 16));
    EXPECT_ERROR(nn::apply_lora(*model, {.targets = {"head"}}), "'head'", "distributed already",
                 "before parallelize_module");
  });
}

}  // namespace
}  // namespace tessera::tensor_parallel
