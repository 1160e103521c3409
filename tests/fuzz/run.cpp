// Builds, distributes and trains the model of a case, like a user's program. Without a mesh, the
// same code computes the expected results on one rank.

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "fuzz/case.h"
#include "fuzz/model.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/module.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/ranks.h"
#include "testing/values.h"

namespace tessera::fuzz {
namespace {

tensor_parallel::StylePtr make_style(const StyleSpec& s) {
  using namespace tensor_parallel;
  switch (s.kind) {
    case StyleKind::kColwise:
      return colwise_parallel({.output_layouts = s.output, .use_local_output = s.local});
    case StyleKind::kRowwise:
      return rowwise_parallel(
          {.input_layouts = s.takes_part ? std::optional<Placement>(Shard{-1}) : std::nullopt,
           .output_layouts = s.output,
           .use_local_output = s.local});
    case StyleKind::kSequence:
      return sequence_parallel({.sequence_dim = s.dim, .use_local_output = s.local});
    case StyleKind::kReplicate:
      return replicate_parallel({.use_local_output = s.local});
    case StyleKind::kPrepareInput:
      return prepare_module_input({.input_layouts = {Replicate{}},
                                   .desired_input_layouts = {s.output},
                                   .use_local_output = s.local});
    case StyleKind::kPrepareOutput:
      return prepare_module_output({.output_layouts = {Replicate{}},
                                    .desired_output_layouts = {s.output},
                                    .use_local_output = s.local});
    case StyleKind::kFusedColwise:
      return fused_colwise_parallel({.parts = s.parts, .use_local_output = s.local});
  }
  return nullptr;
}

DeviceMesh make_mesh(const MeshSpec& spec, const testing::Rank& rank) {
  std::vector<std::int64_t> sizes{spec.replicas, spec.data / spec.experts, spec.experts};
  std::vector<std::string> names{"replicas", "dp", "ep"};
  sizes.insert(spec.tensor_first ? sizes.begin() : sizes.end(), spec.tensor);
  names.insert(spec.tensor_first ? names.begin() : names.end(), "tp");
  return rank.mesh(sizes, names);
}

/// Returns the mesh that FSDP uses for experts (if `experts`) or for all other parameters.
DeviceMesh data_mesh(const MeshSpec& spec, const DeviceMesh& mesh, bool experts = false) {
  const DeviceMesh data = experts || spec.experts == 1 ? mesh["dp"] : mesh[{"dp", "ep"}].flatten();
  return spec.replicas > 1 ? DeviceMesh::concatenate({mesh["replicas"], data}) : data;
}

fsdp::Options fsdp_options(const FsdpSpec& spec) {
  fsdp::Options options;
  if (spec.reshard != Reshard::kDefault) {
    options.reshard_after_forward = spec.reshard == Reshard::kAlways;
  }
  if (spec.offload) {
    options.offload_policy = fsdp::OffloadPolicy{};
  }
  options.post_forward_mesh_size = spec.post_forward;
  if (spec.placement == ShardPlacement::kLast) {
    options.shard_placement = [](const std::string&, const at::Tensor& parameter) {
      return std::optional<Placement>(Shard{parameter.dim() - 1});
    };
  } else if (spec.placement == ShardPlacement::kReplicateVectors) {
    options.shard_placement = [](const std::string&, const at::Tensor& parameter) {
      return parameter.dim() == 1 ? std::optional<Placement>(Replicate{}) : std::nullopt;
    };
  }
  return options;
}

constexpr int kSteps = 2;
// A large eps, so that gradients of rounding errors do not change parameters. The gradient of the
// keys' bias, for example, is 0 without rounding errors.
constexpr double kAdamEps = 1e-4;

struct Trace {
  std::vector<double> losses;  ///< losses of this rank's rows, one per step and evaluation
  std::vector<double> grad_norms;
  std::map<std::string, at::Tensor> parameters;
  int steps = 0;  ///< `steps`: number of completed steps
};

/// A rank's part of each batch: part `index` of `count` equal parts.
struct Part {
  std::int64_t index = 0, count = 1;
};

struct Rows {
  std::int64_t first = 0, count = 0;
};

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

class Training {
 public:
  explicit Training(const Case& c, std::uint64_t flips = 0) : case_(c), flips_(flips) {}
  /// Trains the model on `mesh`, or on one rank if `mesh` is nullopt.
  void run(const std::optional<DeviceMesh>& mesh, Trace& trace) {
    build(mesh);
    make_optimizer();
    for (int step = 0; step < kSteps; ++step) {
      trace.losses.push_back(accumulate(step));
      if (mesh) {
        plant();
      }
      trace.grad_norms.push_back(grad_norm());
      step_();
      zero_grad_();
      nn::update_selection_bias(*net_, 0.02);
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
    // Without FSDP and a tensor-parallel plan, only equal seeds make the ranks' weights equal.
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

  /// Planted::kWrongGradient: multiplies the gradient of the final RMSNorm's weight by 1.001.
  void plant() {
    if (case_.planted == Planted::kWrongGradient && case_.model.final_norm == NormKind::kRms) {
      net_->named_slots().back().second->persistent().mutable_grad().mul_(1.001);
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
    parts_ = {replica * spec.data + mesh.local_rank("dp") * spec.experts + mesh.local_rank("ep"),
              spec.replicas * spec.data};
    data_ = data_mesh(spec, mesh);
    const auto shard = [&] { shard_parameters(mesh); };
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
    split_experts(mesh);
    checkpoint();
    if (!case_.fsdp.before_tensor_parallel) {
      shard();
    }
    sharded_ = wrapped_ || !case_.plan.empty();
  }

  void split_experts(const DeviceMesh& mesh) {
    const MeshSpec& spec = case_.mesh;
    if (spec.experts > 1 || spec.experts_on_tensor) {
      // Experts accept inputs distributed over tp only if tp is the last dimension of the ep mesh.
      const DeviceMesh tp = mesh["tp"], ep = mesh["ep"];
      nn::apply_expert_parallel(*net_, spec.experts == 1        ? tp
                                       : spec.experts_on_tensor ? DeviceMesh::concatenate({ep, tp})
                                                                : ep);
    }
  }

  /// Applies activation checkpointing, in the run on one rank as well.
  void checkpoint() {
    const Checkpointing kind = case_.train.checkpointing;
    if (kind == Checkpointing::kNone) {
      return;
    }
    nn::ModulePredicate select = nn::of_class<Block>();
    nn::CheckpointOptions options;
    if (kind == Checkpointing::kSelective) {
      options.policy = nn::save_matmuls_and_attention();
    } else if (kind == Checkpointing::kHalves) {
      select = [](const std::string&, const nn::ModuleBase& module) {
        return dynamic_cast<const Attention*>(&module) != nullptr ||
               dynamic_cast<const Mlp*>(&module) != nullptr;
      };
    }
    nn::apply_activation_checkpointing(*net_, select, options);
  }

  void shard_parameters(const DeviceMesh& mesh) {
    const FsdpSpec& spec = case_.fsdp;
    if (spec.kind == DataParallel::kNone) {
      return;
    }
    wrapped_ = true;
    fsdp::Options options = fsdp_options(spec);
    if (case_.mesh.experts > 1) {
      const DeviceMesh experts = data_mesh(case_.mesh, mesh, /*experts=*/true);
      options.parameter_mesh = [experts](const std::string& name, const at::Tensor&) {
        return name.find("mixture.experts.") != std::string::npos ? std::optional(experts)
                                                                  : std::nullopt;
      };
    }
    const auto wrap = [&](nn::ModuleBase& module) {
      spec.kind == DataParallel::kReplicate ? fsdp::replicate(module, data_, options)
                                            : fsdp::fully_shard(module, data_, options);
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

  /// Tells FSDP whether the next micro-batch is the last of its step.
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

  /// Returns this rank's loss: the sum of the rank's token losses, divided by the number of tokens
  /// in `all`, times the number of batch parts. FSDP averages over the parts.
  at::Tensor loss_of(int step, const Rows& all) {
    const Rows rows = part_of(all, parts_);
    const std::int64_t sequence = case_.train.sequence, vocabulary = case_.model.vocabulary;
    const at::Tensor ids = testing::counting_values({case_.train.batch, sequence + 1}, at::kLong)
                               .mul(7 + step)
                               .add(static_cast<std::int64_t>(case_.seed % 1000))
                               .square()
                               .remainder(vocabulary)
                               .narrow(0, rows.first, rows.count);
    // A random operator on a distributed tensor draws numbers by the elements' global indices.
    // BatchPart makes random operators on plain tensors draw the same numbers.
    std::optional<BatchPart> all_rows;
    if (!sharded_) {
      all_rows.emplace(0, 1);
    }
    const at::Tensor inputs = ids.narrow(1, 0, sequence).contiguous();
    const at::Tensor targets = ids.narrow(1, 1, sequence).flatten();
    const at::Tensor loss =
        whole(sum_of_losses(inputs, targets)) *
        (static_cast<double>(parts_.count) / static_cast<double>(all.count * sequence));
    const MlpSpec& feed = case_.model.feed;
    if (!has_experts() || !net_->is_training()) {
      return loss;
    }
    const nn::RouterLosses router = nn::take_router_losses(*net_, data_);
    return feed.auxiliary_loss ? loss + router.load_balancing * 0.1 + router.z * 0.01 : loss;
  }

  bool has_experts() const { return case_.model.mlp && case_.model.feed.kind == MlpKind::kExperts; }

  at::Tensor sum_of_losses(const at::Tensor& inputs, const at::Tensor& targets) const {
    if (case_.train.loss_in_forward) {
      return (*net_)(inputs, targets).at(0);
    }
    std::vector<at::Tensor> outputs = (*net_)(inputs, at::Tensor());
    const bool split = case_.train.loss == Loss::kLossParallel && targets.numel() > 0;
    // Outside of the parallelized module, the library cannot know the layout of plain targets.
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
  DeviceMesh data_;       ///< `data_`: mesh of data-parallel ranks; undefined on one rank
  bool wrapped_ = false;  ///< `wrapped_`: whether FSDP is applied
  bool sharded_ = false;  ///< `sharded_`: whether FSDP or tensor parallelism is applied
  std::function<void()> step_, zero_grad_;
};

/// Trains on one rank with the whole batch. If `flips` is not 0, flips the last bits of half of the
/// initial weights, selected by the seed `flips`.
void train_alone(const Case& c, Trace& trace, std::uint64_t flips = 0) {
  tessera::manual_seed(c.seed);
  Training(c, flips).run(std::nullopt, trace);
}

using std::chrono::steady_clock;

constexpr std::array kVerdicts{"equal",     "refused", "not comparable", "refused late",
                               "different", "hung",    "crashed",        "no oracle"};

struct Ended {
  bool well = true;
  bool by_peer = false;  ///< `by_peer`: another rank caused the failure
  std::string error;
};

Ended run_rank(const Case& c, const testing::Rank& rank, Trace& trace) {
  try {
    tessera::manual_seed(c.seed);
    Training(c).run(make_mesh(c.mesh, rank), trace);
    return {};
  } catch (const comm::PeerError& error) {
    return {false, true, error.what()};
  } catch (const Error& error) {
    return {false, false, error.what()};
  } catch (const std::exception& error) {
    // Messages of libtorch's errors have a stack trace after the first line.
    const std::string text = error.what();
    return {false, false, "(libtorch) " + text.substr(0, text.find('\n'))};
  }
}

struct Runs {
  std::vector<Trace> traces;
  std::vector<Ended> ends;
  bool timed_out = false;
};

Runs run_ranks(const Case& c, std::chrono::seconds timeout) {
  const auto size = static_cast<std::size_t>(c.mesh.ranks());
  Runs runs{std::vector<Trace>(size), std::vector<Ended>(size)};
  const auto start = steady_clock::now();
  // The watchdog must name the waiting ranks before the collective times out.
  const testing::RanksOptions options{.world = {.timeout = timeout, .watchdog = timeout / 2},
                                      .deadline = 3 * timeout};
  testing::ErrorsOfRanks(
      c.mesh.ranks(),
      [&](testing::Rank& rank) {
        const auto r = static_cast<std::size_t>(rank.rank());
        runs.ends[r] = run_rank(c, rank, runs.traces[r]);
        if (!runs.ends[r].well) {
          rank.world()->abort();
        }
      },
      options);
  runs.timed_out = steady_clock::now() - start >= timeout;
  return runs;
}

/// Returns a failed rank: if possible, a rank whose failure no other rank caused.
std::size_t first_to_fail(const std::vector<Ended>& ends) {
  const auto own = std::ranges::find_if(ends, [](const Ended& e) { return !e.well && !e.by_peer; });
  const auto any = std::ranges::find_if(ends, [](const Ended& e) { return !e.well; });
  return static_cast<std::size_t>((own != ends.end() ? own : any) - ends.begin());
}

Outcome refusal(const Runs& runs) {
  const std::size_t rank = first_to_fail(runs.ends);
  const std::string text = fmt::format("rank {}: {}", rank, runs.ends[rank].error);
  if (runs.timed_out) {
    return {Verdict::kHung, text};
  }
  const bool late = std::ranges::any_of(runs.traces, [](const Trace& t) { return t.steps > 0; });
  return {late ? Verdict::kRefusedLate : Verdict::kRefused, text};
}

/// Compares the ranks' results with the results of one rank. Describes the first differences.
class Comparison {
 public:
  Comparison(const Case& c, const Trace& oracle)
      // With clipping, the tolerance is larger: clip_grad_norm_() computes the clip factor in fp32.
      : oracle_(oracle), tolerance_(c.train.clip ? 1e-5 : 1e-9) {
    for (const double norm : oracle.grad_norms) {
      largest_gradient_ = std::max(largest_gradient_, norm);
    }
  }

  Outcome outcome(const std::vector<Trace>& traces) {
    compare_losses(traces);
    for (std::size_t rank = 0; rank < traces.size(); ++rank) {
      compare_norms(rank, traces[rank]);
      compare_parameters(rank, traces[rank]);
    }
    return text_.empty() ? Outcome{} : Outcome{Verdict::kDifferent, text_};
  }

  /// The maximum of (difference / tolerance) over all comparisons.
  double worst() const { return worst_; }

 private:
  bool exceeds(double difference, double allowed) {
    const double multiple = difference / allowed;
    worst_ = std::isnan(multiple) ? HUGE_VAL : std::max(worst_, multiple);
    return !(multiple <= 1);
  }

  bool differ(double a, double b, double tolerance) {
    return a != b && exceeds(std::abs(a - b), tolerance * std::max(1.0, std::abs(b)));
  }

  template <class... Parts>
  void note(fmt::format_string<Parts...> format, Parts&&... parts) {
    if (++differences_ <= 4) {
      text_ += (text_.empty() ? "" : "; ") + fmt::format(format, std::forward<Parts>(parts)...);
    }
  }

  /// The mean of all ranks' losses must equal the loss on one rank.
  void compare_losses(const std::vector<Trace>& traces) {
    for (std::size_t i = 0; i < oracle_.losses.size(); ++i) {
      double sum = 0;
      for (const Trace& trace : traces) {
        sum += trace.losses[i];
      }
      const double mean = sum / static_cast<double>(traces.size());
      if (differ(mean, oracle_.losses[i], tolerance_)) {
        note("loss {} is {:.12g}, not {:.12g}", i, mean, oracle_.losses[i]);
      }
    }
  }

  void compare_norms(std::size_t rank, const Trace& trace) {
    for (std::size_t i = 0; i < oracle_.grad_norms.size(); ++i) {
      if (differ(trace.grad_norms[i], oracle_.grad_norms[i], 1e-5)) {
        note("gradient norm {} of rank {} is {:.8g}, not {:.8g}", i, rank, trace.grad_norms[i],
             oracle_.grad_norms[i]);
      }
    }
  }

  void compare_parameters(std::size_t rank, const Trace& trace) {
    for (const auto& [name, expected] : oracle_.parameters) {
      const at::Tensor& found = trace.parameters.at(name);
      const double difference = (found - expected).abs().max().item<double>();
      const double largest = expected.abs().max().item<double>();
      // Gradients near 0 have rounding errors in proportion to the largest gradient.
      if (exceeds(difference, tolerance_ * std::max({1.0, largest, largest_gradient_}))) {
        note("{} of rank {} differs by {:.3g} of {:.3g}, with gradients of {:.3g}", name, rank,
             difference, largest, largest_gradient_);
      }
    }
  }

  const Trace& oracle_;
  double tolerance_;
  double largest_gradient_ = 0;
  double worst_ = 0;
  int differences_ = 0;
  std::string text_;
};

}  // namespace

std::string to_string(Verdict verdict) {
  return kVerdicts[static_cast<std::size_t>(verdict)];
}

Verdict verdict_of(const std::string& text) {
  const auto found = std::ranges::find(kVerdicts, text);
  TESSERA_CHECK(found != kVerdicts.end(), "'", text, "' is no verdict");
  return static_cast<Verdict>(found - kVerdicts.begin());
}

namespace {

void seed_libtorch(std::uint64_t seed) {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  generator.set_current_seed(seed);
}

/// Whether training on one rank diverges, so that rounding errors would decide the results.
bool explodes(const Trace& oracle) {
  constexpr double kMost = 1e6;
  return !std::ranges::all_of(oracle.losses, [](double x) { return std::isfinite(x); }) ||
         !std::ranges::all_of(oracle.grad_norms, [](double x) { return x < kMost; });
}

/// Trains on one rank with flipped last bits of the initial weights, several times. Returns the
/// largest Comparison::worst(), an estimate of the effect of rounding errors.
double worst_of_rounding(const Case& c, const Trace& oracle) {
  constexpr std::uint64_t kRuns = 16;
  double worst = 0;
  for (std::uint64_t flips = 1; flips <= kRuns; ++flips) {
    Trace flipped;
    seed_libtorch(c.seed);
    testing::RunRanks(1, [&](testing::Rank&) { train_alone(c, flipped, flips); });
    Comparison comparison(c, oracle);
    comparison.outcome({flipped});
    worst = std::max(worst, comparison.worst());
  }
  return worst;
}

/// If a mesh's results differ, repeats the training on one rank with flipped last bits of the
/// initial weights. The verdict is kNotComparable if the flips change the results at least half as
/// much.
Outcome compared(const Case& c, const Trace& oracle, const std::vector<Trace>& traces) {
  Comparison comparison(c, oracle);
  Outcome outcome = comparison.outcome(traces);
  if (outcome.verdict != Verdict::kDifferent) {
    return outcome;
  }
  const double rounding = worst_of_rounding(c, oracle);
  outcome.what +=
      fmt::format("; {:.3g} times what is allowed, one rank with other last bits {:.3g}",
                  comparison.worst(), rounding);
  constexpr double kLittle = 2;
  if (comparison.worst() <= kLittle * rounding) {
    outcome.verdict = Verdict::kNotComparable;
  }
  return outcome;
}

}  // namespace

Outcome run_case(const Case& c, std::chrono::seconds timeout) {
  Trace oracle;
  seed_libtorch(c.seed);
  try {
    testing::RunRanks(1, [&](testing::Rank&) { train_alone(c, oracle); });
  } catch (const Error& error) {
    return {Verdict::kRefused, error.what()};
  } catch (const std::exception& error) {
    const std::string text = error.what();
    return {Verdict::kNoOracle, text.substr(0, text.find('\n'))};
  }
  if (explodes(oracle)) {
    return {Verdict::kNotComparable, ""};
  }
  seed_libtorch(c.seed);
  const Runs runs = run_ranks(c, timeout);
  const bool well = std::ranges::all_of(runs.ends, [](const Ended& e) { return e.well; });
  return well ? compared(c, oracle, runs.traces) : refusal(runs);
}

}  // namespace tessera::fuzz
