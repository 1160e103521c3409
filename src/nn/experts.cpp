// Mixtures of experts, in this order: the exchange of rows, the experts, the router and the module,
// expert parallelism, and auxiliary losses.

#include "tessera/nn/experts.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/dtensor/detail/experts.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/kernels/detail/fake_state.h"
#include "tessera/nn/detail/lora.h"
#include "tessera/nn/detail/records.h"
#include "tessera/nn/functional.h"
#include "tessera/nn/initialization.h"

namespace tessera::nn {

namespace {

using Counts = std::vector<std::int64_t>;

Counts sums_of_parts(const Counts& counts, std::int64_t parts) {
  Counts sums;
  const auto size = static_cast<std::ptrdiff_t>(counts.size()) / parts;
  for (auto at = counts.begin(); std::ssize(sums) < parts; at += size) {
    sums.push_back(std::accumulate(at, at + size, std::int64_t{0}));
  }
  return sums;
}

/// Numbers of rows that this rank sends and receives, for each rank and each expert of the rank.
struct ExchangedCounts {
  Counts sent, received;
};

/// All-to-all of counts: `counts`, (ranks * n), has n counts for each rank. On a GPU, the CPU waits
/// for the received counts.
ExchangedCounts exchange_counts(const at::Tensor& counts, const DeviceMesh& mesh) {
  const at::Tensor received = at::empty_like(counts);
  const Counts each(static_cast<std::size_t>(mesh.size()), counts.numel() / mesh.size());
  flush_pending_transfers(mesh.group()).all_to_all(received, counts, each, each)->wait();
  const at::Tensor both = at::cat({counts, received}).cpu();
  const auto* values = both.const_data_ptr<std::int64_t>();
  return {{values, values + counts.numel()}, {values + counts.numel(), values + both.numel()}};
}

Counts to_vector(const at::Tensor& counts) {
  const at::Tensor values = counts.cpu();
  return {values.const_data_ptr<std::int64_t>(),
          values.const_data_ptr<std::int64_t>() + values.numel()};
}

}  // namespace

std::pair<at::Tensor, RowCounts> all_to_all_uneven(const at::Tensor& x,
                                                   const std::vector<std::int64_t>& sent,
                                                   const DeviceMesh& mesh) {
  TESSERA_CHECK(std::ssize(sent) == mesh.size(), "all_to_all_uneven: ", sent.size(),
                " counts for a mesh of ", mesh.size(), " ranks; pass one count for each rank");
  const at::Tensor counts = at::tensor(sent, at::kLong).to(x.device());
  auto [own, received] = exchange_counts(counts, mesh);
  RowCounts rows{std::move(own), std::move(received)};
  at::Tensor result = all_to_all_uneven(x, rows, mesh);
  return {std::move(result), std::move(rows)};
}

at::Tensor all_to_all_uneven(const at::Tensor& x, const RowCounts& counts, const DeviceMesh& mesh) {
  for (const Counts* rows : {&counts.sent, &counts.received}) {
    TESSERA_CHECK(rows->empty() || std::ranges::min(*rows) >= 0, "all_to_all_uneven: the counts ",
                  c10::IntArrayRef(*rows), " have a negative number of rows; pass 0 or more");
  }
  return tessera::detail::all_to_all_uneven(x, counts.received, counts.sent, mesh.group());
}

GroupedLinear::GroupedLinear(std::int64_t experts, std::int64_t in_features,
                             std::int64_t out_features) {
  weight = register_slot("weight", {experts, out_features, in_features});
}

at::Tensor GroupedLinear::forward(const at::Tensor& x, const std::vector<std::int64_t>& counts,
                                  bool rows_are_split) {
  at::Tensor own = weight;
  comm::WorldPtr ranks;  // world over which dropout numbers the rows; nullptr for a plain weight
  if (tessera::is_distributed(own)) {
    const DistributedTensor distributed(own);
    ranks = distributed.mesh().world();
    Placements gradient = distributed.placements();
    for (Placement& placement : gradient) {
      if (rows_are_split && std::holds_alternative<Replicate>(placement)) {
        placement = Partial{};
      }
    }
    const tessera::detail::LocalPartsScope within_the_product;
    own = distributed.to_local(gradient);
  }
  at::Tensor y = tessera::detail::grouped_linear(x, own, counts);
  const auto lora = attached<LoraBranchOf<GroupedLinear>>();
  if (lora == nullptr) {
    return y;
  }
  std::optional<BatchPart> part;
  if (ranks != nullptr) {
    part.emplace(ranks->rank(), ranks->size());
  }
  const at::Tensor inner = lora->a->forward(lora->input(x, is_training()), counts, rows_are_split);
  return y.add(lora->b->forward(inner, counts, rows_are_split), lora->scale);
}

/// Initialises the weight and the adapter of each expert like those of a separate Linear.
void GroupedLinear::reset_parameters(const InitContext& init) {
  const double bound = 1 / std::sqrt(static_cast<double>(weight->size(2)));
  init.fill(weight, init::uniform(-bound, bound));
  if (const auto lora = attached<LoraBranchOf<GroupedLinear>>()) {
    init.fill(lora->b->weight, init::zeros());
  }
}

/// The experts of a mixture of experts; each expert is a SwiGLU.
class detail::Experts : public Module<detail::Experts> {
 public:
  explicit Experts(const ExpertsOptions& options) {
    const auto linear = [&](const std::string& name, std::int64_t in, std::int64_t out) {
      const auto module =
          register_module(name, std::make_shared<GroupedLinear>(options.experts, in, out));
      StoredParts parts{.stacked = true};
      for (std::int64_t expert = 0; expert < options.experts; ++expert) {
        parts.parts.push_back({std::to_string(expert) + "." + name, /*rows=*/1});
      }
      module->weight.slot()->role.stored_parts = parts;
      return module;
    };
    gate = linear(options.names.mlp.gate, options.hidden, options.inner);
    up = linear(options.names.mlp.up, options.hidden, options.inner);
    down = linear(options.names.mlp.down, options.inner, options.hidden);
  }

  /// Calls forward() of gate, up and down directly, without hooks: a hook may compare results
  /// between ranks, but the ranks have different rows.
  at::Tensor forward(const at::Tensor& x, const Counts& counts, bool rows_are_split) {
    const at::Tensor inner =
        silu_mul(gate->forward(x, counts, rows_are_split), up->forward(x, counts, rows_are_split));
    return down->forward(inner, counts, rows_are_split);
  }

  std::shared_ptr<GroupedLinear> gate, up, down;
};

/// Routing: the experts that a router has chosen for each token.
struct MixtureOfExperts::Routing {
  at::Tensor scores;   ///< the router's scores, (tokens, experts)
  at::Tensor experts;  ///< the chosen experts, (tokens, top_k) int64
  at::Tensor weights;  ///< the weights of the chosen experts, (tokens, top_k)
  at::Tensor counts;   ///< number of tokens that chose each expert, (experts) int64
};

MixtureOfExperts::MixtureOfExperts(const ExpertsOptions& options) : options_(options) {
  const ExpertsOptions& o = options;
  TESSERA_CHECK(o.hidden > 0 && o.inner > 0 && o.experts > 0, "a MixtureOfExperts with ", o.experts,
                " experts, ", o.hidden, " features and ", o.inner,
                " inner features is invalid; each number must be 1 or more");
  TESSERA_CHECK(o.top_k > 0 && o.top_k <= o.experts, "a MixtureOfExperts with top_k ", o.top_k,
                " of ", o.experts, " experts is invalid; top_k must be from 1 to ", o.experts);
  gate_ = register_module(
      o.names.router, std::make_shared<Linear>(o.hidden, o.experts, LinearOptions{.bias = false}));
  experts_ = register_module(o.names.experts, std::make_shared<detail::Experts>(o));
  if (o.shared_inner > 0) {
    const MlpOptions shared{.hidden = o.hidden,
                            .inner = o.shared_inner,
                            .init_std = o.init_std,
                            .output_init_std = o.output_init_std};
    shared_ = register_module(o.names.shared, std::make_shared<SwiGlu>(shared));
  }
  if (o.selection_bias) {
    selection_bias = register_buffer_slot("selection_bias", {o.experts});
  }
}

namespace {

bool has_last_dim(const at::Tensor& tensor, const DeviceMesh& mesh) {
  if (!tessera::is_distributed(tensor)) {
    return false;
  }
  const DeviceMesh all = sharding_spec(tensor).mesh;
  return all == mesh || all[all.shape().names().back()] == mesh;
}

}  // namespace

at::Tensor MixtureOfExperts::forward(const at::Tensor& input) {
  check_called();
  const bool distributed = tessera::is_distributed(input);
  const DeviceMesh over = distributed ? sharding_spec(input).mesh : DeviceMesh();
  TESSERA_CHECK(!distributed || has_last_dim(*experts_->gate->weight, over),
                "a MixtureOfExperts was given an input on ", to_string(over),
                ", but its experts are neither on this mesh nor on a mesh with this mesh as last "
                "dimension; call nn::apply_expert_parallel with such a mesh");
  const tessera::detail::LocalPartsScope within_the_mixture;
  const auto& region = tessera::detail::random_region();
  TESSERA_CHECK(distributed || !ep_ || region == nullptr || !region->replicates_on(ep_),
                "a MixtureOfExperts that is split over ", to_string(ep_),
                " was given a plain input, which is equal on all of these ranks; pass a "
                "distributed input, for example with prepare_module_input");
  const at::Tensor flat = input.dim() == 2 ? input : input.flatten(0, -2);
  at::Tensor rows = flat;
  if (distributed) {
    rows = DistributedTensor(rows).redistribute(Placements{Shard{0}});
  }
  // If a tensor-parallel plan shards the router's weight, the layout of the logits differs from the
  // layout of the rows.
  const auto local = [distributed](const at::Tensor& tensor) {
    const Placement rows_of = distributed ? Placement(Shard{0}) : Replicate{};
    return tessera::is_distributed(tensor)
               ? DistributedTensor(tensor).redistribute(Placements{rows_of}).to_local()
               : tensor;
  };
  const at::Tensor logits = local((*gate_)(rows)), x = local(rows);
  TESSERA_CHECK(
      logits.size(0) == x.size(0) && logits.size(1) == options_.experts, "the router of ",
      options_.experts, " experts returned sizes ", logits.sizes(), " for ", x.size(0),
      " rows of this rank; parallelize the router so that it returns a distributed tensor");
  const Routing routing = route(logits);
  record(logits, routing, over);
  at::Tensor result = mix(x, routing, distributed);
  if (distributed) {
    const DistributedTensor split(rows);
    result = DistributedTensor::from_local(result, split.spec(), rows.sizes().vec())
                 .redistribute(sharding_spec(flat).layout);
  }
  result = input.dim() == 2 ? result : result.view_as(input);
  return shared_ == nullptr ? result : result + (*shared_)(input);
}

namespace {

/// Assigns experts to tokens round-robin, (tokens, top_k), for a memory plan. If `load` is not 1,
/// expert 0 gets `load` times the mean number of tokens.
at::Tensor planned_choice(const ExpertsOptions& options, std::int64_t tokens, double load) {
  const std::int64_t k = options.top_k, experts = options.experts;
  const bool even = load == 1 || k == experts;
  const double mean = static_cast<double>(tokens * k) / static_cast<double>(experts);
  const std::int64_t of_first =
      even ? 0 : std::min<std::int64_t>(tokens, std::llround(load * mean));
  Counts chosen;
  for (std::int64_t token = 0, next = 0; token < tokens; ++token) {
    if (token < of_first) {
      chosen.push_back(0);
    }
    for (; std::ssize(chosen) < (token + 1) * k; ++next) {
      chosen.push_back(even ? next % experts : 1 + next % (experts - 1));
    }
  }
  return at::tensor(chosen, at::kLong).view({tokens, k});
}

}  // namespace

at::Tensor MixtureOfExperts::choose(const at::Tensor& scores) const {
  if (kernels::in_fake_mode()) {
    return planned_choice(options_, scores.size(0), planned_load_);
  }
  const at::Tensor biased = selection_bias.defined() ? scores + *selection_bias : scores;
  return std::get<1>(at::topk(biased.detach(), options_.top_k, 1));
}

MixtureOfExperts::Routing MixtureOfExperts::route(const at::Tensor& logits) {
  Routing routing;
  const at::Tensor wide = logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
  const bool softmax = options_.scores == RouterScores::kSoftmax;
  routing.scores = softmax ? at::softmax(wide, 1) : at::sigmoid(wide);
  routing.experts = choose(routing.scores);
  routing.weights = routing.scores.gather(1, routing.experts);
  if (options_.normalize) {
    const at::Tensor sum = routing.weights.sum(1, /*keepdim=*/true);
    routing.weights = routing.weights / (softmax ? sum : sum + 1e-20);
  }
  if (options_.scaling != 1) {
    routing.weights = routing.weights * options_.scaling;
  }
  routing.counts = at::bincount(routing.experts.flatten(), {}, options_.experts);
  return routing;
}

namespace {

struct Order {
  at::Tensor order, inverse;
};

/// Returns the order that sorts `keys` (stable sort), and the inverse of this order.
Order sorting(const at::Tensor& keys) {
  const at::Tensor order = at::argsort(keys, /*stable=*/true);
  const at::Tensor inverse = at::empty_like(order);
  inverse.scatter_(0, order, at::arange(order.numel(), order.options()));
  return {order, inverse};
}

/// Returns the order that sorts received rows by expert, then by rank; rows arrive by rank, then by
/// expert. `received`: numbers of rows, (ranks, experts).
Order by_expert(const Counts& received, std::int64_t experts, const at::Tensor& like) {
  const auto options = like.options().dtype(at::kLong);
  const std::int64_t ranks = std::ssize(received) / std::max<std::int64_t>(experts, 1);
  const at::Tensor keys = at::arange(experts, options).repeat({ranks});
  const at::Tensor counts = at::tensor(received, at::kLong).to(like.device());
  return sorting(at::repeat_interleave(keys, counts, 0, like.size(0)));
}

}  // namespace

/// Sends rows, which are sorted by expert, to the ranks of their experts. Returns results in the
/// order of `rows`. `counts`: the number of rows for each expert.
at::Tensor MixtureOfExperts::compute_on_ranks(const at::Tensor& rows, const at::Tensor& counts,
                                              bool rows_are_split) {
  // `most` is the number of experts of the first ranks. The last ranks can have fewer experts, so
  // `counts` is padded.
  const std::int64_t ranks = ep_.size(), most = (options_.experts + ranks - 1) / ranks;
  const at::Tensor padded = at::constant_pad_nd(counts, {0, ranks * most - options_.experts});
  const ExchangedCounts exchanged = exchange_counts(padded, ep_);
  const RowCounts there{sums_of_parts(exchanged.sent, ranks),
                        sums_of_parts(exchanged.received, ranks)};
  const at::Tensor received = all_to_all_uneven(rows, there, ep_);
  const auto [sorted, unsorted] = by_expert(exchanged.received, most, received);
  Counts own(static_cast<std::size_t>(most));
  for (std::size_t i = 0; i < exchanged.received.size(); ++i) {
    own[i % own.size()] += exchanged.received[i];
  }
  own.resize(static_cast<std::size_t>(
      std::clamp<std::int64_t>(options_.experts - ep_.local_rank() * most, 0, most)));
  const at::Tensor results = experts_->forward(
      tessera::detail::permute_rows(received, sorted, unsorted), own, rows_are_split);
  return all_to_all_uneven(tessera::detail::permute_rows(results, unsorted, sorted),
                           {there.received, there.sent}, ep_);
}

/// Returns for each token of x the weighted sum of its experts' results. `rows_are_split`: see
/// GroupedLinear::forward().
at::Tensor MixtureOfExperts::mix(const at::Tensor& x, const Routing& routing, bool rows_are_split) {
  const std::int64_t k = options_.top_k;
  const auto [order, inverse] = sorting(routing.experts.flatten());
  const at::Tensor rows = tessera::detail::permute_rows(x, order, inverse, k);
  const at::Tensor results =
      ep_ ? compute_on_ranks(rows, routing.counts, rows_are_split)
          : experts_->forward(rows, to_vector(routing.counts), rows_are_split);
  const at::Tensor of_tokens =
      tessera::detail::permute_rows(results, inverse, order).unflatten(0, {-1, k});
  return (of_tokens * routing.weights.to(x.scalar_type()).unsqueeze(2)).sum(1);
}

/// Records sums over tokens for the auxiliary losses. A recomputation (activation checkpointing)
/// computes the sums, so that autograd saves the same tensors as in forward, but records no sums.
void MixtureOfExperts::record(const at::Tensor& logits, const Routing& routing,
                              const DeviceMesh& token_mesh) {
  if (!is_training() || !c10::GradMode::is_enabled()) {
    return;
  }
  at::Tensor probabilities = routing.scores;
  if (options_.scores == RouterScores::kSigmoid) {
    probabilities = probabilities / (probabilities.sum(1, /*keepdim=*/true) + 1e-20);
  }
  const at::Tensor wide = logits.to(routing.scores.scalar_type());
  detail::RouterRecord record{.probabilities = probabilities.sum(0),
                              .z = at::logsumexp(wide, 1).square().sum(),
                              .choices = routing.counts,
                              .tokens = logits.size(0),
                              .token_mesh = token_mesh};
  if (!is_recomputing()) {
    router_state_.record = std::move(record);
  }
}

void MixtureOfExperts::reset_parameters(const InitContext& init) {
  const double out = options_.output_init_std > 0 ? options_.output_init_std : options_.init_std;
  init.fill(gate_->weight, init::normal(0, options_.init_std));
  init.fill(experts_->gate->weight, init::normal(0, options_.init_std));
  init.fill(experts_->up->weight, init::normal(0, options_.init_std));
  init.fill(experts_->down->weight, init::normal(0, out));
  if (selection_bias.defined()) {
    init.set_buffer(selection_bias, at::zeros({options_.experts}));
  }
}

void MixtureOfExperts::set_expert_parallel(const DeviceMesh& mesh) {
  Placements placements(static_cast<std::size_t>(mesh.ndim()), Replicate{});
  placements[0] = Shard{0};
  visit_modules(*experts_, [&](const std::string&, ModuleBase& linear) {
    for (const auto& [name, slot] : linear.slots()) {
      distribute_parameter(*slot, mesh, placements, "apply_expert_parallel");
    }
  });
  const DeviceMesh ep = mesh.ndim() == 1 ? mesh : mesh[mesh.shape().names().front()];
  ep_ = ep.size() > 1 ? ep : DeviceMesh();
}

namespace {

std::vector<MixtureOfExperts*> mixtures_of(ModuleBase& module) {
  std::vector<MixtureOfExperts*> mixtures;
  visit_modules(module, [&](const std::string&, ModuleBase& each) {
    if (auto* mixture = dynamic_cast<MixtureOfExperts*>(&each)) {
      mixtures.push_back(mixture);
    }
  });
  return mixtures;
}

void sum_over(const at::Tensor& counts, const DeviceMesh& mesh) {
  if (mesh && mesh.size() > 1) {
    flush_pending_transfers(mesh.group_of_all_ranks()).all_reduce(counts, ReduceOp::kSum)->wait();
  }
}

/// Returns the sum of `term` over the ranks of `mesh`, as a plain tensor. Differentiable.
at::Tensor summed(const at::Tensor& term, const DeviceMesh& mesh) {
  return mesh ? DistributedTensor::from_local(term, mesh, {Partial{}}).full_tensor() : term;
}

}  // namespace

std::int64_t apply_expert_parallel(ModuleBase& module, const DeviceMesh& mesh) {
  const std::vector<MixtureOfExperts*> mixtures = mixtures_of(module);
  for (MixtureOfExperts* mixture : mixtures) {
    mixture->set_expert_parallel(mesh);
  }
  return std::ssize(mixtures);
}

namespace {

struct RouterSums {
  at::Tensor probabilities;        ///< sums of probabilities, (experts)
  at::Tensor z;                    ///< squared log-sum-exp, ()
  std::vector<at::Tensor> counts;  ///< tokens per expert, one tensor per mixture; then `tokens`
  std::int64_t tokens = 0;         ///< number of tokens, summed over the mixtures
  DeviceMesh token_mesh;
};

void take_record(RouterSums& sums, MixtureOfExperts& mixture) {
  const detail::RouterRecord record = std::exchange(mixture.router_state().record, {});
  TESSERA_CHECK(record.choices.defined(),
                "take_router_losses: a MixtureOfExperts has not run since the last call; call "
                "take_router_losses after each forward in training with gradients");
  const bool is_first = sums.counts.empty();
  TESSERA_CHECK(is_first || sums.probabilities.numel() == record.choices.numel(),
                "take_router_losses: the MixtureOfExperts modules have ",
                sums.probabilities.numel(), " and ", record.choices.numel(),
                " experts; pass them one by one");
  TESSERA_CHECK(is_first || sums.token_mesh == record.token_mesh,
                "take_router_losses: the inputs of the MixtureOfExperts modules were on different "
                "meshes or partly plain; use inputs on one mesh, or pass the modules one by one");
  sums.probabilities = is_first ? record.probabilities : sums.probabilities + record.probabilities;
  sums.z = is_first ? record.z : sums.z + record.z;
  sums.counts.push_back(record.choices);
  sums.tokens += record.tokens;
  sums.token_mesh = record.token_mesh;
}

std::vector<double> largest_over_mean(const at::Tensor& load) {
  const at::Tensor counts = load.to(at::kDouble).cpu();
  const at::Tensor ratios = at::amax(counts, 1) / counts.mean(1).clamp_min(1e-9);
  const auto* values = ratios.const_data_ptr<double>();
  return {values, values + ratios.numel()};
}

}  // namespace

RouterLosses take_router_losses(ModuleBase& module, const DeviceMesh& mesh) {
  const std::vector<MixtureOfExperts*> mixtures = mixtures_of(module);
  TESSERA_CHECK(!mixtures.empty(), "take_router_losses: ", module.name(),
                " has no MixtureOfExperts; call it only for models with experts");
  RouterSums sums;
  for (MixtureOfExperts* mixture : mixtures) {
    take_record(sums, *mixture);
  }
  const std::int64_t experts = sums.probabilities.numel(), rows = std::ssize(mixtures);
  sums.counts.push_back(at::full({1}, sums.tokens, sums.counts.front().options()));
  const at::Tensor counts = at::cat(sums.counts);
  sum_over(counts, mesh);
  sum_over(counts, sums.token_mesh);
  const at::Tensor load = counts.narrow(0, 0, rows * experts).view({rows, experts});
  for (std::int64_t i = 0; i < rows; ++i) {
    at::Tensor& sum = mixtures[static_cast<std::size_t>(i)]->router_state().load;
    sum = sum.defined() ? sum + load[i] : load[i];
  }
  const at::Tensor tokens =
      counts.narrow(0, rows * experts, 1).clamp_min(1).to(sums.probabilities.options());
  const at::Tensor of_rank = tokens / (mesh ? mesh.size() : 1);
  const at::Tensor share = load.sum(0).to(sums.probabilities.options()) / tokens;
  const at::Tensor own = at::cat({sums.probabilities, sums.z.view({1})});
  const at::Tensor means = summed(own, sums.token_mesh) / of_rank;
  return {.load_balancing = (share * means.narrow(0, 0, experts)).sum() * experts,
          .z = means[experts],
          .largest_over_mean = largest_over_mean(load)};
}

void update_selection_bias(ModuleBase& module, double rate) {
  for (MixtureOfExperts* mixture : mixtures_of(module)) {
    at::Tensor& load = mixture->router_state().load;
    if (mixture->selection_bias.defined() && load.defined()) {
      const at::Tensor counts = load.to(at::kDouble);
      const at::Tensor bias = *mixture->selection_bias;
      bias.add_((counts.mean() - counts).sign().to(bias.options()), rate);
    }
    load.reset();
  }
}

}  // namespace tessera::nn
