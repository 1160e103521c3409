// A mixture of experts. The experts are split over one mesh dimension. Every rank has all other
// layers.
//   tessera-run --nproc 4 -- build/bin/tutorial_11_experts [EXPERTS EP]

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>

#include <iostream>
#include <string>

#include "tessera/tessera.hpp"

using namespace tessera;

constexpr std::int64_t kDim = 16, kRows = 48;  // kRows: number of rows (tokens) over all ranks

// [model]
/// Each row (token) is computed by the two experts with the largest scores of the router.
struct Model : nn::Module<Model> {
  explicit Model(std::int64_t experts)
      : mixture(*this, "mixture",
                nn::ExpertsOptions{
                    .hidden = kDim, .inner = 24, .experts = experts, .top_k = 2, .init_std = 0.3}) {
  }
  at::Tensor forward(const at::Tensor& rows) {
    const at::Tensor x = input(rows);
    return x + mixture(x);
  }

  nn::Child<nn::Linear> input{*this, "input", kDim, kDim};
  nn::Child<nn::MixtureOfExperts> mixture;
};
// [model]

// [mesh]
/// Builds the model on the meta device and splits it over `mesh`.
std::shared_ptr<Model> split_model(std::int64_t experts, const DeviceMesh& mesh) {
  auto model = [experts] {
    const nn::MetaDevice meta;
    return std::make_shared<Model>(experts);
  }();
  // Experts are split over "ep". Ranks that differ only in "dp" have the same experts.
  nn::apply_expert_parallel(*model, mesh["ep"]);
  // Every rank has different rows, so the ranks of both mesh dimensions are data-parallel. FSDP
  // splits the experts over "dp" and all other parameters over both dimensions, flattened.
  fsdp::Options options;
  options.parameter_mesh = [mesh](const std::string& name, const at::Tensor&) {
    return name.starts_with("mixture.experts.") ? std::optional(mesh["dp"]) : std::nullopt;
  };
  fsdp::fully_shard(*model, mesh.flatten("all"), options);
  return model;
}
// [mesh]

struct Batch {
  at::Tensor x, target;
};

/// Returns the rows of data-parallel rank `index` among `count` ranks. Any rank can call
/// batch_of().
Batch batch_of(int step, std::int64_t index, std::int64_t count) {
  const at::Generator generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(step));
  const at::Tensor x = at::randn({kRows, kDim}, generator);
  const std::int64_t rows = kRows / count;
  return {x.narrow(0, index * rows, rows), x.flip(1).narrow(0, index * rows, rows)};
}

// [loss]
/// Returns the loss with the auxiliary losses. `ranks`: the ranks that have different rows.
at::Tensor loss_of(Model& model, const Batch& batch, const DeviceMesh& ranks = {}) {
  const at::Tensor loss = at::mse_loss(model(batch.x), batch.target);
  const nn::RouterLosses router = nn::take_router_losses(model, ranks);
  return loss + 0.01 * router.load_balancing + 0.001 * router.z;
}
// [loss]

// [verify]
/// The auxiliary losses depend on the rows of all ranks, so the one-rank model gets all rows.
void verify(Model& model, const DeviceMesh& mesh) {
  Model reference(model.mixture->options().experts);
  const Batch all = batch_of(0, 0, 1), own = batch_of(0, mesh.world()->rank(), mesh.size());
  observe::verify(
      model, reference, mesh,
      [&](Model& each) { return &each == &model ? loss_of(each, own, mesh) : loss_of(each, all); },
      {.batch_dims = {"dp", "ep"}, .splits_samples = true})
      .check();
}
// [verify]

// [plan]
/// Plans each rank's memory and communication, if all experts get equally many rows.
std::string plan_of(std::int64_t experts, const MeshShape& mesh) {
  const auto make = [experts](const DeviceMesh& ranks) { return split_model(experts, ranks); };
  const auto step = [](Model& model, optim::Optimizer& optimizer, const DeviceMesh& ranks) {
    loss_of(model, batch_of(0, 0, ranks.size()), ranks).backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  return planning::to_text(planning::plan(make, step, mesh, {}));
}
// [plan]

void run_rank(std::int64_t experts, std::int64_t ep) {
  const comm::WorldPtr world = comm::world_from_environment();
  ep = world->size() % ep == 0 ? ep : 1;
  TESSERA_CHECK(kRows % world->size() == 0, kRows, " rows can't be split evenly over ",
                world->size(), " ranks; start a number of ranks that divides ", kRows);
  const DeviceMesh mesh = init_device_mesh(world, {world->size() / ep, ep}, {"dp", "ep"});
  const std::shared_ptr<Model> model = split_model(experts, mesh);
  nn::to_empty(*model, at::kCPU);
  nn::init_weights(*model, /*seed=*/0);
  optim::AdamW optimizer(*model, {.lr = 1e-2});
  verify(*model, mesh);

  for (int step = 1; step <= 20; ++step) {
    const at::Tensor loss = loss_of(*model, batch_of(step, world->rank(), world->size()), mesh);
    loss.backward();
    optim::clip_grad_norm_(optimizer.parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
    const at::Tensor mean = training::mean_over(loss, mesh);
    if (world->rank() == 0) {
      std::cout << "step " << step << " loss " << mean.item<double>() << std::endl;
    }
  }
  if (world->rank() == 0) {
    std::cout << plan_of(experts, MeshShape({4, ep}, {"dp", "ep"}));
  }
}

int main(int argc, char** argv) {
  const std::int64_t experts = argc > 2 ? std::stoll(argv[1]) : 6;
  const std::int64_t ep = argc > 2 ? std::stoll(argv[2]) : 2;
  return comm::run_main([=] { run_rank(experts, ep); });
}
