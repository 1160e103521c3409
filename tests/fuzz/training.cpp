// A user's program: it builds the model, distributes it, and trains it on its part of the batch.
// The same program without a mesh is the oracle.

#include "fuzz/training.h"

#include <c10/core/GradMode.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <thread>

#include "fuzz/model.h"
#include "fuzz/options.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/manual_seed.h"
#include "tessera/dtensor/random.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/fsdp/wrap_policy.h"
#include "tessera/nn/activation_checkpointing.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/meta_device.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/values.h"

namespace tessera::fuzz {
namespace {

constexpr int kSteps = 2;
// A gradient that is zero but for rounding, as of a bias of keys, must not become a step.
constexpr double kAdamEps = 1e-4;

/// Which of the parts of the batch this rank has.
struct Part {
  std::int64_t index = 0, count = 1;
};

struct Rows {
  std::int64_t first = 0, count = 0;
};

/// Part `index` of `count` nearly equal ones.
Rows part_of(const Rows& rows, const Part& part) {
  const std::int64_t from = rows.count * part.index / part.count;
  const std::int64_t to = rows.count * (part.index + 1) / part.count;
  return {rows.first + from, to - from};
}

bool freezes(Frozen frozen, const std::string& name) {
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  switch (frozen) {
    case Frozen::kNone:
      return false;
    case Frozen::kEmbedding:
      return name.starts_with("embed");
    case Frozen::kNorms:
      return has("norm");
    case Frozen::kAllButAdapters:
      return !has(".a.") && !has(".b.") && !has("head") && !has("embed");
    case Frozen::kFirstBlock:
      return name.starts_with("blocks.0.");
    case Frozen::kBiases:
      return name.ends_with("bias");
  }
  return false;
}

/// The model of one rank, and what becomes of it on a mesh.
class Training {
 public:
  explicit Training(const Case& c, std::uint64_t flips = 0) : case_(c), flips_(flips) {}
  /// `mesh`: none for one rank alone.
  void run(const std::optional<DeviceMesh>& mesh, Trace& trace) {
    build(mesh);
    make_optimizer();
    for (int step = 0; step < kSteps; ++step) {
      trace.losses.push_back(accumulate(step));
      if (mesh) {
        plant(step, *mesh);
      }
      trace.grad_norms.push_back(grad_norm());
      step_();
      zero_grad_();
      if (case_.train.evaluate) {
        trace.losses.push_back(evaluate());
      }
      ++trace.steps;
    }
    for (const auto& [name, slot] : net_->named_slots()) {
      trace.parameters[name] = testing::full_tensor(slot->persistent()).clone();
    }
  }

 private:
  void build(const std::optional<DeviceMesh>& mesh) {
    const Init init = mesh ? case_.train.init : Init::kBeforeWrapping;
    make_net(init);
    // Ranks that no mesh of the program joins have nothing to do with each other.
    const bool joined = !case_.plan.empty() || case_.mesh.replicas * case_.mesh.data > 1;
    const std::int64_t other = init == Init::kOtherSeeds && joined ? mesh->world()->rank() : 0;
    if (init == Init::kBeforeWrapping || init == Init::kOtherSeeds) {
      nn::init_weights(*net_, case_.seed + static_cast<std::uint64_t>(other));
    }
    if (flips_ != 0) {
      flip_last_bits();
    }
    for (const auto& [name, slot] : net_->named_slots()) {
      if (freezes(case_.train.frozen, name)) {
        slot->get().set_requires_grad(false);
      }
    }
    if (mesh) {
      distribute(*mesh);
    } else {
      checkpoint();
    }
    if (init == Init::kMeta || init == Init::kMetaUnfilled) {
      nn::to_empty(*net_, at::kCPU);
    }
    if (init == Init::kMeta) {
      nn::init_weights(*net_, case_.seed);
    }
  }

  void flip_last_bits() {
    std::mt19937_64 draw(flips_);
    for (const auto& [name, slot] : net_->named_slots()) {
      const at::Tensor& tensor = slot->persistent();
      auto* bits = static_cast<std::uint64_t*>(tensor.mutable_data_ptr());
      for (std::int64_t i = 0; i < tensor.numel(); ++i) {
        bits[i] ^= draw() & 1U;
      }
    }
  }

  /// What the tests of the search have asked for. Only models with an RMSNorm at the end are wrong.
  void plant(int step, const DeviceMesh& mesh) {
    const bool last_rank = mesh.world()->rank() + 1 == mesh.world()->size();
    if (case_.planted == Planted::kWrongGradient && case_.model.final_norm == NormKind::kRms) {
      net_->named_slots().back().second->persistent().mutable_grad().mul_(1.001);
    }
    TESSERA_CHECK(case_.planted != Planted::kLateError || step == 0, "a planted error");
    if (case_.planted == Planted::kCrash && last_rank) {
      std::abort();
    }
    while (case_.planted == Planted::kHang && last_rank) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
    }
  }

  void make_net(Init init) {
    std::optional<nn::MetaDevice> meta;
    if (init != Init::kBeforeWrapping && init != Init::kOtherSeeds) {
      meta.emplace();
    }
    net_ = std::make_shared<Net>(case_.model, case_.train.loss);
    net_->to(at::kDouble);
  }

  void distribute(const DeviceMesh& mesh) {
    const MeshSpec& spec = case_.mesh;
    const std::int64_t replica = spec.replicas > 1 ? mesh.local_rank("replicas") : 0;
    parts_ = {replica * spec.data + mesh.local_rank("dp"), spec.replicas * spec.data};
    const auto shard = [&] { shard_parameters(data_mesh(spec, mesh)); };
    if (case_.fsdp.before_tensor_parallel) {
      shard();
    }
    if (!case_.plan.empty()) {
      tensor_parallel::ParallelizePlan plan;
      for (const PlanEntry& entry : case_.plan) {
        plan.emplace_back(entry.pattern, make_style(entry.style));
      }
      tensor_parallel::parallelize_module(*net_, mesh["tp"], plan);
    }
    checkpoint();
    if (!case_.fsdp.before_tensor_parallel) {
      shard();
    }
    sharded_ = wrapped_ || !case_.plan.empty();
  }

  /// Adds one rank's activation checkpointing too: a recomputation must not change its numbers.
  void checkpoint() {
    const Checkpointing kind = case_.train.checkpointing;
    if (kind == Checkpointing::kNone) {
      return;
    }
    nn::ActivationCheckpointing what;
    what.select = nn::of_class<Block>();
    if (kind == Checkpointing::kSelective) {
      what.options.policy = nn::save_matmuls_and_attention();
    } else if (kind == Checkpointing::kHalves) {
      what.select = [](const std::string&, const nn::ModuleBase& module) {
        return dynamic_cast<const Attention*>(&module) != nullptr ||
               dynamic_cast<const Mlp*>(&module) != nullptr;
      };
    }
    nn::apply_activation_checkpointing(*net_, what);
  }

  void shard_parameters(const DeviceMesh& mesh) {
    const FsdpSpec& spec = case_.fsdp;
    if (spec.kind == DataParallel::kNone) {
      return;
    }
    wrapped_ = true;
    fsdp::Options options = fsdp_options(spec);
    options.allow_mixed_frozen = true;
    if (spec.units == Units::kPolicy && spec.kind == DataParallel::kFullyShard) {
      fsdp::apply_plan(*net_, mesh,
                       fsdp::plan_units(*net_, fsdp::wrap_class<Block>(), options));
      return;
    }
    const auto wrap = [&](nn::ModuleBase& module) {
      spec.kind == DataParallel::kReplicate ? fsdp::replicate(module, mesh, options)
                                            : fsdp::fully_shard(module, mesh, options);
    };
    std::vector<nn::ModuleBase*> units = inner_units();
    for (nn::ModuleBase* unit : units) {
      wrap(*unit);
    }
    wrap(*net_);
    for (std::size_t i = 0; spec.prefetch && i + 1 < units.size(); ++i) {
      fsdp::set_forward_prefetch(*units[i], {units[i + 1]});
    }
  }

  std::vector<nn::ModuleBase*> inner_units() const {
    std::vector<nn::ModuleBase*> units;
    for (const auto& block : net_->blocks()) {
      if (case_.fsdp.units == Units::kHalves) {
        const std::vector<nn::ModuleBase*> halves = block->halves();
        units.insert(units.end(), halves.begin(), halves.end());
      } else if (case_.fsdp.units != Units::kRoot) {
        units.push_back(block.get());
      }
    }
    return units;
  }

  void make_optimizer() {
    const OptimizerKind kind = case_.train.optimizer;
    if (kind == OptimizerKind::kSgd) {
      own(std::make_shared<optim::Sgd>(*net_, optim::SgdOptions{.lr = 0.01, .momentum = 0.9}));
    } else if (kind == OptimizerKind::kAdamW) {
      own(std::make_shared<optim::AdamW>(*net_, optim::AdamWOptions{.lr = 0.01, .eps = kAdamEps}));
    } else if (kind == OptimizerKind::kStockSgd) {
      stock(std::make_shared<torch::optim::SGD>(net_->parameters(),
                                                torch::optim::SGDOptions(0.01).momentum(0.9)));
    } else {
      stock(std::make_shared<torch::optim::AdamW>(net_->parameters(),
                                                  torch::optim::AdamWOptions(0.01).eps(kAdamEps)));
    }
  }

  void own(const std::shared_ptr<optim::Optimizer>& optimizer) {
    step_ = [optimizer] { optimizer->step(); };
    zero_grad_ = [optimizer] { optimizer->zero_grad(); };
  }

  void stock(const std::shared_ptr<torch::optim::Optimizer>& optimizer) {
    step_ = [optimizer] { optimizer->step(); };
    zero_grad_ = [optimizer] { optimizer->zero_grad(); };
  }

  /// The losses of a step's micro-batches, whose gradients add up.
  double accumulate(int step) {
    const std::int64_t micro_batches = case_.train.micro_batches;
    double sum = 0;
    for (std::int64_t i = 0; i < micro_batches; ++i) {
      announce(i + 1 == micro_batches);
      const Rows all = part_of({0, case_.train.batch}, {i, micro_batches});
      const at::Tensor loss = loss_of(step, all) / static_cast<double>(micro_batches);
      loss.backward();
      sum += loss.item<double>();
    }
    return sum;
  }

  /// Says how the micro-batch under way belongs to its step.
  void announce(bool last) {
    if (!wrapped_ || case_.train.micro_batches == 1) {
      return;
    }
    switch (case_.train.accumulate) {
      case Accumulate::kReduceEach:
        return;
      case Accumulate::kReduceLast:
        return fsdp::set_requires_gradient_sync(*net_, last);
      case Accumulate::kOverlapped:
        return fsdp::set_is_last_backward(*net_, last);
      case Accumulate::kKeepUnsharded:
        return fsdp::set_reshard_after_backward(*net_, last);
      case Accumulate::kAllReduceLast:
        return fsdp::set_requires_all_reduce(*net_, last);
    }
  }

  double evaluate() {
    const c10::NoGradGuard no_grad;
    net_->eval();
    const double loss = loss_of(kSteps, {0, case_.train.batch}).item<double>();
    net_->train();
    return loss;
  }

  /// The loss of this rank's rows of `all`: their sum over the number of all tokens, times the
  /// number of parts, since FSDP averages over them.
  at::Tensor loss_of(int step, const Rows& all) {
    const Rows rows = part_of(all, parts_);
    const std::int64_t sequence = case_.train.sequence, vocabulary = case_.model.vocabulary;
    const at::Tensor ids = testing::counting_values({case_.train.batch, sequence + 1}, at::kLong)
                               .mul(7 + step)
                               .add(static_cast<std::int64_t>(case_.seed % 1000))
                               .square()
                               .remainder(vocabulary)
                               .narrow(0, rows.first, rows.count);
    // Plain random operators draw by element in what is sharded; so that they do so here, too.
    std::optional<BatchPart> all_rows;
    if (!sharded_) {
      all_rows.emplace(0, 1);
    }
    const at::Tensor inputs = ids.narrow(1, 0, sequence).contiguous();
    const at::Tensor targets = ids.narrow(1, 1, sequence).flatten();
    return whole(sum_of_losses(inputs, targets)) *
           (static_cast<double>(parts_.count) / static_cast<double>(all.count * sequence));
  }

  at::Tensor sum_of_losses(const at::Tensor& inputs, const at::Tensor& targets) const {
    if (case_.train.loss_in_forward) {
      return (*net_)(inputs, targets).at(0);
    }
    std::vector<at::Tensor> outputs = (*net_)(inputs, at::Tensor());
    const bool split = case_.train.loss == Loss::kLossParallel && targets.numel() > 0;
    // Outside of a parallelized forward it is not known what the plain targets are.
    outputs[0] = split ? outputs[0] : whole(outputs[0]);
    outputs[1] = whole(outputs[1]);
    return fuzz::sum_of_losses(outputs, targets, case_.train.loss);
  }

  static at::Tensor whole(const at::Tensor& tensor) {
    const bool distributed = tensor.defined() && tessera::is_distributed(tensor);
    return distributed ? DistributedTensor(tensor).full_tensor() : tensor;
  }

  double grad_norm() const {
    const std::vector<nn::SlotPtr> slots = optim::slots_of(*net_);
    const at::Tensor norm =
        case_.train.clip ? optim::clip_grad_norm_(slots, 0.5) : optim::grad_norm(slots);
    return norm.item<double>();
  }

  const Case& case_;
  std::uint64_t flips_;
  std::shared_ptr<Net> net_;
  Part parts_;
  bool wrapped_ = false;  ///< by FSDP
  bool sharded_ = false;  ///< by FSDP or tensor parallelism
  std::function<void()> step_, zero_grad_;
};

}  // namespace

void train_alone(const Case& c, Trace& trace, std::uint64_t flips) {
  tessera::manual_seed(c.seed);
  Training(c, flips).run(std::nullopt, trace);
}

void train_distributed(const Case& c, const testing::Rank& rank, Trace& trace) {
  tessera::manual_seed(c.seed);
  Training(c).run(make_mesh(c.mesh, rank), trace);
}

}  // namespace tessera::fuzz
