// A mixture of experts: the experts are split over one mesh dimension, all other layers are on
// every rank.
//   tessera-run --nproc 4 -- build/bin/tutorial_11_experts [EXPERTS EP]

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros_like.h>

#include <iostream>
#include <string>
#include <vector>

#include "tessera/tessera.hpp"

using namespace tessera;

constexpr std::int64_t kDim = 16, kHidden = 24, kRows = 32;  // kRows is the sum over all ranks

// [experts]
/// One MLP per expert. A row (token) goes to the two experts with the largest router weights.
struct Experts : nn::Module<Experts> {
  explicit Experts(std::int64_t count) {
    up = register_slot("up", {count, kDim, kHidden});
    down = register_slot("down", {count, kHidden, kDim});
  }
  void reset_parameters(const nn::InitContext& init) override {
    init.fill(up, nn::init::normal(0, 0.3));
    init.fill(down, nn::init::normal(0, 0.3));
  }

  /// Returns the sum of this rank's experts, (rows, dim), for the rows of all ranks of `ep`.
  /// `weights` is (rows, experts), with 0 where a row is not routed to an expert.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& weights) {
    const at::Tensor own_up = local(up), own_down = local(down);
    if (own_up.size(0) == 0) {
      // This rank has no experts. The result must still depend on all inputs, because every rank
      // takes part in the collectives of backward.
      return 0 * (x + weights.sum(1, /*keepdim=*/true) + own_up.sum() + own_down.sum());
    }
    at::Tensor sum = at::zeros_like(x);
    for (std::int64_t i = 0; i < own_up.size(0); ++i) {
      const at::Tensor weight = weights.select(1, first_expert() + i);
      const at::Tensor rows = weight.nonzero().squeeze(1);
      const at::Tensor y = at::relu(x.index_select(0, rows).mm(own_up[i])).mm(own_down[i]);
      sum = sum.index_add(0, rows, y * weight.index_select(0, rows).unsqueeze(1));
    }
    return sum;
  }

  at::Tensor local(const nn::Parameter& parameter) const {
    return ep ? DistributedTensor(*parameter).to_local() : *parameter;
  }
  /// Index of this rank's first expert. Experts are split as in torch.chunk.
  std::int64_t first_expert() const {
    return ep ? (up->size(0) + ep.size() - 1) / ep.size() * ep.local_rank() : 0;
  }

  nn::Parameter up, down;
  DeviceMesh ep;  ///< the mesh over which experts are split; undefined: each rank has all
};
// [experts]

struct Model : nn::Module<Model> {
  explicit Model(std::int64_t experts)
      : router(*this, "router", kDim, experts), experts(*this, "experts", experts) {}
  at::Tensor forward(const at::Tensor& rows) {
    const at::Tensor x = input(rows);
    const auto [largest, chosen] = at::topk(at::softmax(router(x), 1), 2);
    const at::Tensor weights =
        at::zeros({x.size(0), router->weight->size(0)}).scatter(1, chosen, largest);
    return x + own_rows(experts(all_rows(x), all_rows(weights)));
  }

  /// Gathers the rows of all ranks of `ep`. Each rank's gradient comes from its own experts only,
  /// so the gradient is Partial.
  at::Tensor all_rows(const at::Tensor& own) const {
    const DeviceMesh& ep = experts->ep;
    return ep ? DistributedTensor::from_local(own, ep, {Shard{0}})
                    .full_tensor(Placements{Partial{}})
              : own;
  }
  /// Sums `terms` over the ranks of `ep` and returns this rank's rows of the sum.
  at::Tensor own_rows(const at::Tensor& terms) const {
    const DeviceMesh& ep = experts->ep;
    return ep ? DistributedTensor::from_local(terms, ep, {Partial{}})
                    .redistribute({Shard{0}})
                    .to_local()
              : terms;
  }

  nn::Child<nn::Linear> input{*this, "input", kDim, kDim};
  nn::Child<nn::Linear> router;
  nn::Child<Experts> experts;
};

// [mesh]
/// Builds the model on the meta device and splits it over `mesh`.
std::shared_ptr<Model> split_model(std::int64_t experts, const DeviceMesh& mesh) {
  auto model = [experts] {
    const nn::MetaDevice meta;
    return std::make_shared<Model>(experts);
  }();
  // Experts are split over "ep". Ranks that differ only in "dp" have the same experts.
  model->experts->ep = mesh["ep"];
  for (const auto& [name, slot] : model->experts->slots()) {
    nn::distribute_parameter(*slot, mesh["ep"], {Shard{0}});
  }
  // Every rank has different rows, so the ranks of both mesh dimensions are data-parallel. FSDP
  // splits the experts over "dp" and all other parameters over both dimensions, flattened.
  fsdp::Options options;
  options.parameter_mesh = [mesh](const std::string& name, const at::Tensor&) {
    return name.starts_with("experts.") ? std::optional(mesh["dp"]) : std::nullopt;
  };
  fsdp::fully_shard(*model, mesh.flatten("all"), options);
  return model;
}
// [mesh]

struct Batch {
  at::Tensor x, target;
};

/// Returns the rows of data-parallel rank `index` of `count`, on whichever rank calls it.
Batch batch_of(int step, std::int64_t index, std::int64_t count) {
  const at::Generator generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(step));
  const at::Tensor x = at::randn({kRows, kDim}, generator);
  const std::int64_t rows = kRows / count;
  return {x.narrow(0, index * rows, rows), x.flip(1).narrow(0, index * rows, rows)};
}

// [verify]
/// Experts process rows of other ranks, so the one-rank model gets the rows of all ranks.
void verify(Model& model, const DeviceMesh& mesh) {
  Model reference(model.experts->up->size(0));
  const Batch all = batch_of(0, 0, 1), own = batch_of(0, mesh.world()->rank(), mesh.size());
  observe::verify(model, reference, mesh,
                  [&](Model& each) {
                    const Batch& batch = &each == &model ? own : all;
                    return at::mse_loss(each(batch.x), batch.target);
                  },
                  {.batch_dims = {"dp", "ep"}, .splits_samples = true})
      .check();
}
// [verify]

// [plan]
/// Plans each rank's memory and communication, assuming that every expert gets the same number of
/// rows.
std::string plan_of(std::int64_t experts, const MeshShape& mesh) {
  const auto make = [experts](const DeviceMesh& ranks) { return split_model(experts, ranks); };
  const auto step = [](Model& model, optim::Optimizer& optimizer, const DeviceMesh& ranks) {
    const Batch own = batch_of(0, 0, ranks.size());
    at::mse_loss(model(own.x), own.target).backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  planning::PlanOptions options;
  options.data_dependent["aten::nonzero"] = [experts](const kernels::FakeCall& call) {
    const std::int64_t rows = 2 * call.inputs[0].size(0) / experts;
    return std::vector<at::Tensor>{at::arange(rows).unsqueeze(1)};
  };
  return planning::to_text(planning::plan(make, step, mesh, options));
}
// [plan]

void run_rank(std::int64_t experts, std::int64_t ep) {
  const comm::WorldPtr world = comm::world_from_environment();
  ep = world->size() % ep == 0 ? ep : 1;
  TESSERA_CHECK(kRows % world->size() == 0, kRows, " rows can't be shared by ", world->size(),
                " ranks alike; start a number of ranks that divides them");
  const DeviceMesh mesh = init_device_mesh(world, {world->size() / ep, ep}, {"dp", "ep"});
  const std::shared_ptr<Model> model = split_model(experts, mesh);
  nn::to_empty(*model, at::kCPU);
  nn::init_weights(*model, /*seed=*/0);
  optim::AdamW optimizer(*model, {.lr = 1e-2});
  verify(*model, mesh);

  for (int step = 1; step <= 20; ++step) {
    const Batch own = batch_of(step, world->rank(), world->size());
    const at::Tensor loss = at::mse_loss((*model)(own.x), own.target);
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
