// A model made of torch::nn modules, used unchanged: tensor parallelism, FSDP, and the same initial
// values and losses on every mesh.
//   tessera-run --nproc 4 -- build/bin/tutorial_15_torch_nn

#include <ATen/ops/arange.h>
#include <ATen/ops/sin.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/transformercoder.h>

#include <iostream>

#include "tessera/tessera.hpp"

using namespace tessera;

/// Maps (rows, 1, 8, 8) images to (rows, 4) logits. A plain torch::nn model without any use of
/// Tessera.
struct Classifier : torch::nn::Module {
  Classifier() {
    const auto layer = torch::nn::TransformerEncoderLayerOptions(/*d_model=*/16, /*nhead=*/2)
                           .dim_feedforward(50)
                           .dropout(0);
    patches = register_module(
        "patches", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, /*kernel=*/4).stride(4)));
    encoder = register_module(
        "encoder", torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(layer, 2)));
    head = register_module("head", torch::nn::Linear(16, 4));
  }
  at::Tensor forward(const at::Tensor& images) {
    const at::Tensor tokens = patches(images).flatten(2).permute({2, 0, 1});
    return head(encoder(tokens).mean(0));
  }
  torch::nn::Conv2d patches{nullptr};
  torch::nn::TransformerEncoder encoder{nullptr};
  torch::nn::Linear head{nullptr};
};

// [adopted]
std::shared_ptr<nn::Adopted<Classifier>> split_model(const DeviceMesh& mesh) {
  auto model = [] {
    const nn::MetaDevice meta;  // no rank ever allocates the whole model
    return nn::adopt(std::make_shared<Classifier>());
  }();
  using namespace tensor_parallel;
  parallelize_module(*model, mesh["tp"],
                     {{"encoder.layers.*.linear1", colwise_parallel()},
                      {"encoder.layers.*.linear2", rowwise_parallel()}});
  fsdp::fully_shard(*model, mesh["dp"]);
  nn::to_empty(*model, at::kCPU);
  nn::init_weights(*model, /*seed=*/0);
  return model;
}
// [adopted]

void run_rank() {
  const comm::WorldPtr world = comm::world_from_environment();
  const std::int64_t tp = world->size() % 2 == 0 ? 2 : 1;
  const DeviceMesh mesh = init_device_mesh(world, {world->size() / tp, tp}, {"dp", "tp"});
  const auto model = split_model(mesh);
  if (world->rank() == 0) {
    for (const auto& [name, slot] : model->named_slots()) {
      std::cout << name << " " << slot->get().sizes() << "\n";
    }
  }
  optim::AdamW optimizer(*model, {.lr = 1e-2, .weight_decay = 0});

  // The label of an image is the index of the image's brightest quarter.
  constexpr std::int64_t kRows = 16;
  const at::Tensor images =
      at::sin(at::arange(kRows * 64, at::kFloat).square().mul(0.37)).view({kRows, 1, 8, 8});
  const at::Tensor labels = images.view({kRows, 2, 4, 2, 4}).mean({2, 4}).flatten(1).argmax(1);
  const std::int64_t rows = kRows / mesh.size("dp");
  const std::int64_t first = mesh.local_rank("dp") * rows;
  for (int step = 1; step <= 20; ++step) {
    // The logits are distributed over tp; the loss is a plain tensor.
    const at::Tensor loss = tensor_parallel::cross_entropy((*model)(images.narrow(0, first, rows)),
                                                           labels.narrow(0, first, rows));
    loss.backward();
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
