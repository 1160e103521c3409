// GPT-2 built from the library's blocks and trained on a mesh.
//   tessera-run --nproc 4 -- build/bin/tutorial_09_gpt2

#include <ATen/ops/arange.h>
#include <ATen/ops/randint.h>

#include <cmath>
#include <iomanip>
#include <iostream>

#include "tessera/tessera.hpp"

using namespace tessera;

constexpr std::int64_t kVocabulary = 101, kPositions = 24, kHidden = 48, kLayers = 2;
const nn::LinearOptions no_bias{.bias = false};
// With this standard deviation the variance of the residual activations does not grow with depth.
const double output_std = 0.02 / std::sqrt(2.0 * kLayers);
const nn::AttentionOptions attention{.hidden = kHidden,
                                     .heads = 4,
                                     .qkv_bias = true,
                                     .output_bias = true,
                                     .fused_qkv = true,
                                     .dropout = 0.1,
                                     .output_init_std = output_std,
                                     .names = {.fused = "c_attn", .output = "c_proj"}};
const nn::MlpOptions mlp_options{.hidden = kHidden,
                                 .inner = 4 * kHidden,
                                 .bias = true,
                                 .output_init_std = output_std,
                                 .names = {.up = "c_fc", .down = "c_proj"}};

// [gpt2]
struct Block : nn::Module<Block> {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = x + drop(attn(ln_1(x)));
    return h + drop(mlp(ln_2(h)));
  }
  nn::Child<nn::LayerNorm> ln_1{*this, "ln_1", kHidden}, ln_2{*this, "ln_2", kHidden};
  // [gpt2]
  nn::Child<nn::Attention> attn{*this, "attn", attention};
  nn::Child<nn::GeluMlp> mlp{*this, "mlp", mlp_options};
  nn::Child<nn::Dropout> drop{*this, "drop", 0.1};
};

/// The model: maps tokens, (batch, tokens), to logits, (batch, tokens, vocabulary).
struct Gpt2 : nn::Module<Gpt2> {
  Gpt2() {
    for (int i = 0; i < kLayers; ++i) {
      h->push_back(std::make_shared<Block>());
    }
    lm_head->tie_slot("weight", wte->weight.slot());
  }
  at::Tensor forward(const at::Tensor& tokens) {
    const at::Tensor positions = at::arange(tokens.size(1), tokens.options());
    return lm_head(ln_f(h(drop(wte(tokens) + wpe(positions)))));
  }
  void reset_parameters(const nn::InitContext& init) override {
    init.fill(wte->weight, nn::init::normal(0, 0.02));
    init.fill(wpe->weight, nn::init::normal(0, 0.02));
  }
  nn::Child<nn::Embedding> wte{*this, "wte", kVocabulary, kHidden};
  nn::Child<nn::Embedding> wpe{*this, "wpe", kPositions, kHidden};
  nn::Child<nn::Dropout> drop{*this, "drop", 0.1};
  nn::Child<nn::Sequential> h{*this, "h"};
  nn::Child<nn::LayerNorm> ln_f{*this, "ln_f", kHidden};
  nn::Child<nn::Linear> lm_head{*this, "lm_head", kHidden, kVocabulary, no_bias};
};

// [gpt2_plan]
tensor_parallel::ParallelizePlan plan() {
  using namespace tensor_parallel;
  const Placement tokens = Shard{1};  // splits dimension 1 of (batch, tokens, hidden)
  return joined(
      {embedding_plan("wte", {.activations = tokens}),
       embedding_plan("wpe", {.activations = Shard{0}}),  // splits dimension 0 of (tokens, hidden)
       attention_plan("h.*.attn", attention, {.activations = tokens}),
       gelu_mlp_plan("h.*.mlp", mlp_options.names, {.activations = tokens}),
       {{"**.ln_*", sequence_parallel()}, {"lm_head", colwise_parallel()}}});
}
// [gpt2_plan]

/// The number of sequences per step, over all data-parallel ranks.
constexpr std::int64_t kBatch = 8;

/// Returns the sum of all parameters, with the same bits on every mesh.
double sum_of_parameters(const nn::ModuleBase& model) {
  const at::NoGradGuard no_grad;
  double sum = 0;
  for (const auto& [name, slot] : model.named_slots()) {
    sum += DistributedTensor(slot->persistent()).full_tensor().to(at::kDouble).sum().item<double>();
  }
  return sum;
}

void run_rank() {
  const comm::WorldPtr world = comm::world_from_environment();
  const std::int64_t tp = world->size() % 2 == 0 ? 2 : 1;
  const DeviceMesh mesh = init_device_mesh(world, {world->size() / tp, tp}, {"dp", "tp"});
  TESSERA_CHECK(kBatch % mesh.size("dp") == 0, "a batch of ", kBatch,
                " rows can't be split over dp=", mesh.size("dp"), "; start 1, 2, 4, 8 or 16 ranks");
  const auto model = [] {
    const nn::MetaDevice meta;
    return std::make_shared<Gpt2>();
  }();
  tensor_parallel::parallelize_module(*model, mesh["tp"], plan());
  for (const auto& block : model->h->children()) {
    fsdp::fully_shard(dynamic_cast<nn::ModuleBase&>(*block), mesh["dp"]);
  }
  fsdp::fully_shard(*model, mesh["dp"]);
  nn::to_empty(*model, at::kCPU);
  nn::init_weights(*model, /*seed=*/0);
  manual_seed(0);  // seed of dropout
  const double sum = sum_of_parameters(*model);
  if (world->rank() == 0) {
    std::cout << "sum of parameters " << std::setprecision(17) << sum << std::setprecision(6)
              << std::endl;
  }

  optim::AdamW optimizer(*model, {.lr = 1e-2});
  at::manual_seed(0);  // every rank draws the whole batch and uses its own sequences
  for (int step = 1; step <= 20; ++step) {
    const at::Tensor from = at::randint(kVocabulary, {kBatch, 1});
    const at::Tensor by = at::randint(1, 4, {kBatch, 1});
    const at::Tensor text = (from + by * at::arange(kPositions + 1)).remainder(kVocabulary);
    const at::Tensor rows =
        text.chunk(mesh.size("dp"))[static_cast<std::size_t>(mesh.local_rank("dp"))];
    const at::Tensor logits = (*model)(rows.narrow(1, 0, kPositions));
    const at::Tensor loss = tensor_parallel::cross_entropy(logits.flatten(0, 1),
                                                           rows.narrow(1, 1, kPositions).flatten());
    loss.backward();
    optim::clip_grad_norm_(optimizer.parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
    const at::Tensor mean = training::mean_over(loss, mesh["dp"]);
    if (world->rank() == 0) {
      std::cout << "step " << step << " loss " << mean.item<double>() << std::endl;
    }
  }
}

int main() {
  return comm::run_main(&run_rank);
}
