// Mixtures of experts: MixtureOfExperts, its experts and its auxiliary losses, expert parallelism,
// and an all-to-all in which each pair of ranks can exchange a different number of rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/blocks.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// The numbers of rows that this rank exchanges with each rank of a process group.
struct RowCounts {
  std::vector<std::int64_t> sent;      ///< numbers of rows sent to each rank
  std::vector<std::int64_t> received;  ///< numbers of rows received from each rank
};

/// Sends sent[r] rows of x to rank r of the 1-D `mesh`. Returns the received rows in rank order:
/// (sum of sent, ...) -> (sum of received, ...). Collective. Differentiable once. Throws Error
/// unless x has (sum of sent) rows.
std::pair<at::Tensor, RowCounts> all_to_all_uneven(const at::Tensor& x,
                                                   const std::vector<std::int64_t>& sent,
                                                   const DeviceMesh& mesh);
/// Like all_to_all_uneven() with `sent`, if each rank already knows how many rows it receives.
/// Collective: one all-to-all.
at::Tensor all_to_all_uneven(const at::Tensor& x, const RowCounts& counts, const DeviceMesh& mesh);

/// Several Linears without bias, one for each expert, with stacked weights. weight: (experts, out,
/// in). Weight files store the weight of expert e as "experts.<e>.<name>.weight", (out, in).
class GroupedLinear : public Module<GroupedLinear> {
 public:
  GroupedLinear(std::int64_t experts, std::int64_t in_features, std::int64_t out_features);
  /// Multiplies each expert's rows of x by the expert's weight: (rows, in) -> (rows, out). Rows are
  /// in the order of the experts. counts[e]: number of rows of this rank's expert e.
  /// `rows_are_split`: whether ranks with the same weight have different rows, so that the weight's
  /// gradient is a sum over these ranks. Communicates nothing.
  at::Tensor forward(const at::Tensor& x, const std::vector<std::int64_t>& counts,
                     bool rows_are_split = false);
  void reset_parameters(const InitContext& init) override;

  /// Returns the number of experts of all ranks.
  std::int64_t experts() const { return weight->size(0); }

  Parameter weight;
};

/// How a router turns its logits into scores.
enum class RouterScores {
  kSoftmax,  ///< softmax, as in Mixtral, Qwen 3 MoE and OLMoE
  kSigmoid,  ///< sigmoid, as in DeepSeek-V3
};

/// Names of the modules of a MixtureOfExperts. The defaults are those of Qwen 3 MoE and OLMoE.
struct ExpertNames {
  std::string router = "gate", experts = "experts", shared = "shared_experts";
  MlpNames mlp{};  ///< names of the Linears of each expert
};

/// Options of a MixtureOfExperts. The comments name the settings of Hugging Face's config.json.
struct ExpertsOptions {
  std::int64_t hidden = 0;   ///< number of features of the input and of the result
  std::int64_t inner = 0;    ///< number of hidden features of an expert (moe_intermediate_size)
  std::int64_t experts = 0;  ///< number of experts (num_local_experts, num_experts)
  std::int64_t top_k = 2;    ///< number of experts that process each token (num_experts_per_tok)
  RouterScores scores = RouterScores::kSoftmax;
  bool normalize = true;  ///< scales the expert weights of each token to sum 1 (norm_topk_prob)
  double scaling = 1;     ///< factor of a token's router weights (routed_scaling_factor)
  /// Whether a bias, which has no gradient, is added to the scores for the choice of experts only
  /// (DeepSeek-V3, "auxiliary-loss-free load balancing"); see update_selection_bias().
  bool selection_bias = false;
  /// Number of hidden features of the shared expert, which gets all tokens; 0: no shared expert.
  std::int64_t shared_inner = 0;
  /// Weights are drawn from normal(0, init_std). The weights of `down` are drawn from normal(0,
  /// output_init_std), unless output_init_std is 0.
  double init_std = 0.02, output_init_std = 0;
  ExpertNames names{};
};

namespace detail {

/// What a forward of a MixtureOfExperts records for the auxiliary losses: sums over this rank's
/// tokens.
struct RouterRecord {
  at::Tensor probabilities;  ///< sum of the router's probabilities: (experts)
  at::Tensor z;              ///< sum of the squared log-sum-exp of the router's logits
  at::Tensor choices;        ///< number of tokens that chose each expert, (experts) int64
  std::int64_t tokens = 0;
  DeviceMesh token_mesh;  ///< mesh of the tensor-parallel ranks that split tokens, or undefined
};

/// The record of the last forward of a MixtureOfExperts, and the token count of each expert since
/// the last update of the selection bias.
struct RouterState {
  RouterRecord record;
  at::Tensor load;  ///< number of tokens of all ranks that chose each expert, (experts) int64
};

class Experts;

}  // namespace detail

/// A mixture of SwiGLU experts (Shazeer et al. 2017; Fedus et al. 2022): (..., hidden) -> (...,
/// hidden). A router chooses top_k experts for each token, and weights the experts' results. The
/// result of the shared expert is added. No token is dropped.
///
/// With expert parallelism (apply_expert_parallel), each rank has some experts, and receives the
/// tokens of these experts from other ranks. Forward and backward are then collective over the
/// mesh, also for ranks without tokens.
///
/// Child modules: gate (a Linear), experts.gate_proj, experts.up_proj and experts.down_proj
/// (GroupedLinear), and shared_experts (a SwiGlu). Distributed inputs (tensor parallelism) are
/// split by tokens; the result has the same layout.
class MixtureOfExperts : public Module<MixtureOfExperts> {
 public:
  /// The constructor throws Error for sizes below 1, and for a top_k above the number of experts.
  explicit MixtureOfExperts(const ExpertsOptions& options);
  at::Tensor forward(const at::Tensor& input);

  const ExpertsOptions& options() const { return options_; }
  /// Divides the experts and their adapters over the first dimension of `mesh`, as torch.chunk
  /// does. Ranks along other dimensions have the same experts and different tokens. Not collective.
  /// Throws Error if weights are already distributed.
  void set_expert_parallel(const DeviceMesh& mesh);
  /// For memory planning with fake tensors, for which the router computes no scores: expert 0 gets
  /// `largest_over_mean` times the mean number of tokens per expert. 1 (default): equal numbers.
  void set_planned_load(double largest_over_mean) { planned_load_ = largest_over_mean; }

  /// Returns the state that take_router_losses() and update_selection_bias() need.
  detail::RouterState& router_state() { return router_state_; }

  Parameter selection_bias;  ///< bias of the scores, (experts) fp32; or undefined

 private:
  struct Routing;
  Routing route(const at::Tensor& logits);
  at::Tensor choose(const at::Tensor& scores) const;
  at::Tensor compute_on_ranks(const at::Tensor& rows, const at::Tensor& counts,
                              bool rows_are_split);
  at::Tensor mix(const at::Tensor& x, const Routing& routing, bool rows_are_split);
  void record(const at::Tensor& logits, const Routing& routing, const DeviceMesh& token_mesh);
  void reset_parameters(const InitContext& init) override;

  ExpertsOptions options_;
  std::shared_ptr<Linear> gate_;
  std::shared_ptr<detail::Experts> experts_;
  std::shared_ptr<SwiGlu> shared_;
  DeviceMesh ep_;  ///< the ranks that split the experts; undefined: no split
  double planned_load_ = 1;
  detail::RouterState router_state_;
};

/// Splits the experts of every MixtureOfExperts below `module` over the first dimension of `mesh`.
/// Call after apply_lora and parallelize_module, and before fully_shard with
/// Options::parameter_mesh (docs/modules/experts.md). Returns the number of mixtures. Not
/// collective.
std::int64_t apply_expert_parallel(ModuleBase& module, const DeviceMesh& mesh);

/// Auxiliary losses of a model's mixtures of experts, and how evenly tokens are divided over
/// experts.
struct RouterLosses {
  /// Load-balancing loss (Fedus et al. 2022), as in `transformers`: experts * sum over experts of
  /// (share of tokens that chose the expert) * (mean probability of the expert). The loss covers
  /// the tokens of all layers, and is top_k for balanced experts.
  at::Tensor load_balancing;
  at::Tensor z;  ///< mean squared log-sum-exp of the router's logits (Zoph et al. 2022)
  /// For each mixture of experts: the largest token count of an expert, divided by the mean count.
  std::vector<double> largest_over_mean;
};
/// Returns and removes the auxiliary losses of the last training forward, for each mixture of
/// experts below `module`. Add the losses, times a coefficient, to the model's loss before
/// backward. `mesh`: the ranks with different rows. Each rank gets its share; the mean over `mesh`
/// is the whole loss. Collective. Throws Error without a recorded forward.
RouterLosses take_router_losses(ModuleBase& module, const DeviceMesh& mesh = {});

/// Changes the selection biases of mixtures with ExpertsOptions::selection_bias (Wang et al. 2024)
/// by `rate`: up for experts with fewer tokens than the mean, down for experts with more. Call
/// after each optimizer step. take_router_losses() must have counted the tokens. Not collective.
void update_selection_bias(ModuleBase& module, double rate = 1e-3);

}  // namespace tessera::nn
TESSERA_API_END
