// Copies a sharded model's weights to a plain torch::nn model, for a program without Tessera.
//   tessera-run --nproc 4 -- build/bin/tutorial_16_plain_inference FOLDER

#include <ATen/ops/arange.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <filesystem>
#include <iostream>

#include "tessera/tessera.hpp"

using namespace tessera;

struct Net : torch::nn::Module {
  Net() {
    mean = register_buffer("mean", at::zeros({10}));
    up = register_module("up", torch::nn::Linear(10, 30));
    down = register_module("down", torch::nn::Linear(30, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return down(up(x - mean).relu()); }
  at::Tensor mean;
  torch::nn::Linear up{nullptr}, down{nullptr};
};

/// Sets the parameters and buffers of a plain module, by name, from a safetensors file.
void fill(torch::nn::Module& module, const std::filesystem::path& path) {
  const at::NoGradGuard no_grad;
  const checkpoint::SafetensorsFile file(path);
  std::size_t filled = 0;
  for (const auto& tensors : {module.named_parameters(), module.named_buffers()}) {
    for (const auto& item : tensors) {
      item.value().copy_(file.read(item.key()));  // throws if the file has no tensor of this name
      ++filled;
    }
  }
  TESSERA_CHECK(filled == file.tensors().size(), "the module has ", filled, " tensors, but ",
                path.string(), " has ", file.tensors().size(),
                "; construct the module that was saved in the file");
}

void convert(const std::filesystem::path& folder) {
  const auto net = std::make_shared<Net>();
  fill(*net, folder / "model.safetensors");
  torch::save(net, (folder / "net.pt").string());
}

// [infer]
at::Tensor infer(const std::filesystem::path& folder, const at::Tensor& x) {
  const auto net = std::make_shared<Net>();
  torch::load(net, (folder / "net.pt").string());
  net->eval();
  return net->forward(x);
}
// [infer]

void run_rank(const std::filesystem::path& folder) {
  const comm::WorldPtr world = comm::world_from_environment();
  const at::Tensor x = at::sin(at::arange(60, at::kFloat)).view({6, 10});
  const auto net = std::make_shared<Net>();
  net->mean.copy_(x.mean(0));
  const auto model = nn::adopt(net);
  fsdp::fully_shard(*model, init_device_mesh(world, {world->size()}, {"dp"})["dp"]);
  nn::init_weights(*model, /*seed=*/0);
  optim::AdamW optimizer(*model, {.lr = 1e-2});
  for (int step = 0; step < 3; ++step) {
    (*model)(x).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  checkpoint::save_hugging_face(*model, *world, folder, "{}");
  const at::NoGradGuard no_grad;
  model->eval();
  const at::Tensor expected = (*model)(x);  // collective, since FSDP gathers the weights
  if (world->rank() == 0) {
    convert(folder);
    TESSERA_CHECK(infer(folder, x).equal(expected), "the results of the two models differ");
    std::cout << "the plain model computes the same bits\n";
  }
}

int main(int argc, char** argv) {
  return comm::run_main([&] {
    TESSERA_CHECK(argc == 2, "usage: tutorial_16_plain_inference FOLDER");
    run_rank(argv[1]);
  });
}
