#include "race/llama_scenarios.h"

#include <ATen/ATen.h>

#include <memory>
#include <utility>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/activation_checkpointing.h"
#include "tessera/nn/child.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/context_parallel.h"
#include "tessera/nn/lora.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/optim/muon.h"
#include "tessera/optim/optimizer.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/module_values.h"
#include "testing/small_llama.h"

namespace tessera::race {
namespace {

/// What a training does beside the trainer's usual.
struct LlamaTraining {
  fsdp::Options options{};
  bool recomputes = false, has_adapters = false, by_muon = false, scales = false;
};

/// Sharded over dp, tensor parallel over tp, with its blocks as units.
void shard(testing::SmallLlama& model, const DeviceMesh& mesh, const LlamaTraining& how) {
  if (how.has_adapters) {
    nn::apply_lora(model, {.rank = 2, .targets = {"block*.mixer.[qv]", "block*.mlp.down"}});
  }
  testing::fill(model);
  tensor_parallel::parallelize_module(model, mesh["tp"], testing::plan_of_small_llama(true));
  if (how.recomputes) {
    nn::apply_activation_checkpointing(model, {.select = nn::of_class<testing::LlamaBlock>()});
  }
  for (const auto& block : model.blocks) {
    fsdp::fully_shard(*block, mesh["dp"], how.options);
  }
  fsdp::fully_shard(model, mesh["dp"], how.options);
}

std::unique_ptr<optim::Optimizer> optimizer_of(const nn::ModuleBase& model, bool by_muon) {
  if (!by_muon) {
    return std::make_unique<optim::AdamW>(model, optim::AdamWOptions{});
  }
  const optim::MuonSplit split = optim::split_for_muon(model, {"head.weight"});
  return std::make_unique<optim::OptimizerList>(std::vector<std::shared_ptr<optim::Optimizer>>{
      std::make_shared<optim::Muon>(split.matrices, optim::MuonOptions{}),
      std::make_shared<optim::AdamW>(split.rest, optim::AdamWOptions{})});
}

std::function<void(CheckedRank&)> llama_training(const LlamaTraining& how) {
  return [how](CheckedRank& rank) {
    const testing::SmallLlamaConfig config{};
    testing::SmallLlama model(config);
    shard(model, rank.mesh({2, 2}, {"dp", "tp"}), how);
    rank.watch(model);
    const auto optimizer = optimizer_of(model, how.by_muon);
    optim::GradScaler scaler({.enabled = how.scales});
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor ids = at::arange(13, at::kLong).add(step).remainder(config.vocabulary);
      scaler
          .scale(tensor_parallel::cross_entropy(model(ids.narrow(0, 0, 12)), ids.narrow(0, 1, 12)))
          .backward();
      scaler.clip_grad_norm_(optimizer->parameters(), 0.5);
      scaler.step(*optimizer);
      optimizer->zero_grad();
    }
  };
}

/// Attention over a split sequence: (tokens, 8) -> (tokens, 8).
class SplitMixer : public nn::Module<SplitMixer> {
 public:
  explicit SplitMixer(const DeviceMesh& mesh) : split_(mesh) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto parts = (*in)(x).view({1, x.size(0), 6, 4}).transpose(1, 2).chunk(3, 1);
    const at::Tensor y = split_.attention(parts[0], parts[1], parts[2]);
    return x + (*out)(y.transpose(1, 2).reshape({x.size(0), 8}));
  }
  nn::Child<nn::Linear> in{*this, "in", 8, 24}, out{*this, "out", 8, 8};

 private:
  nn::ContextParallel split_;
};

void split_sequences(CheckedRank& rank) {
  const DeviceMesh mesh = rank.mesh({2}, {"cp"});
  const auto first = std::make_shared<SplitMixer>(mesh),
             second = std::make_shared<SplitMixer>(mesh);
  testing::Filled<nn::Sequential> model(first, second);
  for (const auto& block : {first, second}) {
    fsdp::fully_shard(*block, mesh);
  }
  fsdp::fully_shard(model, mesh);
  rank.watch(model);
  optim::AdamW optimizer(model, {});
  for (int step = 0; step < kSteps; ++step) {
    model(testing::uniform_values({6, 8}, step + rank.rank().rank())).square().sum().backward();
    optim::clip_grad_norm_(optimizer.parameters(), 0.5);
    optimizer.step();
    optimizer.zero_grad();
  }
}

}  // namespace

std::vector<Scenario> llama_scenarios() {
  const fsdp::Options offload{.offload_policy = fsdp::OffloadPolicy{}};
  return {{"TensorParallel", 4, llama_training({})},
          {"Recomputed", 4, llama_training({.recomputes = true})},
          {"RecomputedZero2", 4,
           llama_training({.options = {.reshard_after_forward = false}, .recomputes = true})},
          {"Adapters", 4, llama_training({.has_adapters = true})},
          {"Muon", 4, llama_training({.by_muon = true})},
          {"LossScaling", 4, llama_training({.scales = true})},
          {"OffloadTensorParallel", 4, llama_training({.options = offload})},
          {"OffloadMuon", 4, llama_training({.options = offload, .by_muon = true})},
          {"OffloadLossScaling", 4,
           llama_training({.options = offload, .recomputes = true, .scales = true})},
          {"ContextParallel", 2, split_sequences}};
}

}  // namespace tessera::race
