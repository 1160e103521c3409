// The layers Linear, Embedding, RMSNorm, LayerNorm, Dropout and FusedLinear, and functions that
// convert Linears to fp8 and add LoRA adapters to Linears.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/dtensor/random.h"
#include "tessera/export.h"
#include "tessera/nn/detail/linear_product.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Options of a Linear.
struct LinearOptions {
  bool bias = true;
};

/// Computes y = x weight^T + bias: (..., in) -> (..., out). weight: (out, in), bias: (out). Initial
/// values are those of torch.nn.Linear: uniform in ±1/sqrt(in).
///
/// forward is aten::linear. With distributed tensors, forward and backward communicate as the
/// operator's table in docs/sharding_rules.md says, and are then collective. Throws the operator's
/// exceptions for sizes and meshes that do not match.
class Linear : public Module<Linear>,
               public detail::DeferredBias,
               public detail::ReplaceableProduct {
 public:
  Linear(std::int64_t in_features, std::int64_t out_features, LinearOptions options = {});
  at::Tensor forward(const at::Tensor& x);
  /// Calls `product` with x, the weight and the bias instead of aten::linear, for fused operations.
  /// Throws Error for a module with an adapter (apply_lora), and the exceptions of `product`.
  at::Tensor forward(const at::Tensor& x, const detail::LinearProduct& product);
  void reset_parameters(const InitContext& init) override;

  std::int64_t in_features() const { return in_features_; }
  std::int64_t out_features() const { return out_features_; }

  Parameter weight;
  Parameter bias;  ///< the bias; undefined for a Linear without bias

 private:
  friend std::vector<at::Tensor> linear_products(
      const at::Tensor& x, const std::vector<std::reference_wrapper<Linear>>& linears);
  /// Returns the function that makes a LinearProducts object for several Linears of one input;
  /// nullptr if each Linear must be called separately.
  detail::MakeLinearProducts products_together() const;
  at::Tensor own_bias() const;

  std::int64_t in_features_;
  std::int64_t out_features_;
};

/// Calls each of `linears` with x, in order. Backward adds the gradients of x from all Linears in
/// place, except if a Linear has an adapter, is checkpointed, computes in fp8, or has a product
/// that was set without `together` (set_product()). Exceptions and collectives are those of
/// separate calls. Only the order of additions of gradients differs.
std::vector<at::Tensor> linear_products(const at::Tensor& x,
                                        const std::vector<std::reference_wrapper<Linear>>& linears);

/// Looks up rows of a table: indices (...) int64 -> (..., embedding_dim). weight: (num_embeddings,
/// embedding_dim), initially normal(0, 1).
///
/// With a distributed weight the result is distributed on the same mesh. A weight with Shard(0) (a
/// split vocabulary) gives a Partial result: each rank contributes the rows of its shard, and zeros
/// for other rows. A weight with Shard(1) gives a result with Shard(-1). forward does not
/// communicate, and throws the Errors of nn::embedding. See nn::embedding for the gradient.
class Embedding : public Module<Embedding> {
 public:
  Embedding(std::int64_t num_embeddings, std::int64_t embedding_dim);
  at::Tensor forward(const at::Tensor& indices);

  Parameter weight;

 private:
  void reset_parameters(const InitContext& init) override;
};

/// Computes x / sqrt(mean(x^2) + eps) * weight over the last dimension. Statistics are computed in
/// fp32, or in fp64 for fp64 inputs. (..., size) -> (..., size). weight: (size), initially ones.
/// Zhang & Sennrich 2019.
///
/// forward does not communicate. Throws Error for other sizes and for layouts that nn::rms_norm
/// refuses. See nn::rms_norm for the gradients.
class RMSNorm : public Module<RMSNorm> {
 public:
  explicit RMSNorm(std::int64_t size, double eps = 1e-5);
  at::Tensor forward(const at::Tensor& x);
  /// Returns the norm of x + residual, and x + residual (nn::add_rms_norm). A transformer block
  /// passes x + residual to its next norm as `residual`.
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& residual);

  Parameter weight;

 private:
  void reset_parameters(const InitContext& init) override;

  double eps_;
};

/// Options of a LayerNorm.
struct LayerNormOptions {
  double eps = 1e-5;
  bool bias = true;
};

/// Computes (x - mean) / sqrt(var + eps) * weight + bias over the last dimension. (..., size) ->
/// (..., size). weight, bias: (size), initially ones and zeros. Ba et al. 2016.
///
/// forward is aten::layer_norm. With distributed tensors, forward and backward communicate as the
/// operator's table in docs/sharding_rules.md says, and are then collective. Throws the operator's
/// exceptions for other sizes.
class LayerNorm : public Module<LayerNorm> {
 public:
  explicit LayerNorm(std::int64_t size, LayerNormOptions options = {});
  at::Tensor forward(const at::Tensor& x);

  Parameter weight;
  Parameter bias;  ///< the bias; undefined for a LayerNorm without bias

 private:
  void reset_parameters(const InitContext& init) override;

  std::int64_t size_;
  double eps_;
};

namespace detail {

/// The state of a Dropout. Saved checkpoints contain the state.
class DropoutState {
 public:
  /// The module's random key; nullopt if no key was set and the module has not been called yet.
  const std::optional<RandomKey>& key() const { return key_; }
  /// Returns the number of calls so far, which selects the mask of the next call. To repeat a call,
  /// reset the number; activation checkpointing resets the number automatically.
  std::uint64_t calls() const { return calls_; }
  void set_calls(std::uint64_t calls) { calls_ = calls; }

 protected:
  std::optional<RandomKey> key_;
  std::uint64_t calls_ = 0;
};

}  // namespace detail

/// In training, zeroes each element with probability p and multiplies the other elements by
/// 1/(1-p). The result has the sizes, type and layout of x. The gradient uses the mask of the
/// forward. Outside of training, or for p = 0, the result is x itself, and the call is not counted.
///
/// The mask depends on the module's key, the number of calls so far and the element's index in the
/// global tensor. The mask is therefore the same on every mesh, and different in each module.
/// init_weights or set_key sets the key; otherwise the first call derives the key from the module's
/// name. In the forward of a model with fully_shard, the global tensor includes the batch rows of
/// all data-parallel ranks. These ranks compare their numbers of rows when the forward begins;
/// otherwise nothing is communicated (docs/random.md). Thread safety: one thread at a time, because
/// calls are counted.
class Dropout : public Module<Dropout>, public detail::DropoutState {
 public:
  /// The constructor throws Error unless 0 <= p < 1.
  explicit Dropout(double p = 0.5);
  /// Throws Error if x is Partial, or if x is plain and its position in the global tensor is
  /// unknown. Also throws if this Dropout has neither a key nor a name. A Dropout has no name if
  /// another module calls the Dropout without having registered it as a child.
  at::Tensor forward(const at::Tensor& x);
  void set_key(RandomKey key) { key_ = key; }

 private:
  void reset_parameters(const InitContext& init) override;

  double p_;
};

/// One of the Linears that a FusedLinear replaces.
struct FusedPart {
  std::string name;  ///< name of the replaced Linear in files: "q_proj"
  std::int64_t out_features = 0;
};

/// Options of a FusedLinear.
struct FusedLinearOptions {
  bool bias = true;
  /// The weight's rows are divided into this number of equal groups, each with an equal number of
  /// rows of every part. For grouped-query attention, set `groups` to the number of key and value
  /// heads. A group is then one key head, one value head and the query heads that use this key
  /// head, and tensor-parallel ranks get whole groups. With 1 group, the weight has all rows of the
  /// first part, then all rows of the second part, and so on.
  std::int64_t groups = 1;
};

namespace detail {

/// The parts and groups into which the rows of a fused weight are divided (FusedLinear).
class FusedParts {
 public:
  const std::vector<FusedPart>& parts() const { return parts_; }
  std::int64_t groups() const { return groups_; }

 protected:
  FusedParts(std::vector<FusedPart> parts, std::int64_t groups)
      : parts_(std::move(parts)), groups_(groups) {}

  std::vector<FusedPart> parts_;
  std::int64_t groups_;
};

}  // namespace detail

/// Replaces several Linears of the same input by one larger Linear: query, key and value, or gate
/// and up. Files store the parts under their own names (load_hugging_face):
///
///   nn::FusedLinear qkv(dim, {{"q_proj", heads * size}, {"k_proj", kv_heads * size},
///                             {"v_proj", kv_heads * size}}, {.bias = false, .groups = kv_heads});
///   const std::vector<at::Tensor> parts = qkv.split(qkv(x));  // q, k, v
///
/// For tensor parallelism use fused_colwise_parallel. FSDP treats the weight like any parameter.
/// The order of rows is that of linear_qkv in Megatron-LM.
class FusedLinear : public Linear, public detail::FusedParts {
 public:
  /// The constructor throws Error if `groups` does not divide a part's out_features.
  FusedLinear(std::int64_t in_features, std::vector<FusedPart> parts,
              FusedLinearOptions options = {});

  /// Splits a result of forward into its parts, (..., out_features) each. If `output` is only this
  /// rank's shard of the result, the function returns this rank's shards of the parts. The parts
  /// are views if `groups` is 1.
  std::vector<at::Tensor> split(const at::Tensor& output) const;
};

/// Options of convert_to_fp8().
struct Fp8Options {
  /// FQN patterns of Linears that are not converted (see matches_fqn): {"lm_head"}.
  std::vector<std::string> exclude{};
  /// A Linear is converted only if both sizes of its weight are multiples of `multiple_of`.
  /// at::_scaled_mm requires 16. With tensor parallelism each rank's shard must have such sizes:
  /// use 16 * ranks.
  std::int64_t multiple_of = 16;
};

/// Experimental, until a GPU shows a speed-up of at least 1.15 at hidden size 4096.
///
/// Makes the Linears below `module`, including FusedLinears, compute their matrix products in
/// float8_e4m3fn: forward, the input's gradient and the weight's gradient. Each row of the first
/// matrix and each column of the second matrix of a product has its own scale (docs/fp8.md has
/// error bounds). Parameters keep their type in files and in the optimizer. Call convert_to_fp8()
/// before apply_lora (the adapters' matrices are not converted), parallelize_module and
/// fully_shard.
///
/// On a GPU the computation type must be bf16. If a matrix product is fused with another operation
/// (Linear::forward with a function), the function computes the product in the function's type.
///
/// Not collective; every rank must convert the same Linears. Throws Error, before anything is
/// changed, for a pattern that matches no Linear, for a Linear that is already converted or has an
/// adapter, and for a weight that is already distributed. Returns the FQNs of the converted
/// Linears. Linears that are excluded, are tied, or have sizes that multiple_of does not divide are
/// not converted.
std::vector<std::string> convert_to_fp8(ModuleBase& module, const Fp8Options& options = {});

/// Whether convert_to_fp8() has converted `linear`.
bool is_fp8(const Linear& linear);

/// Options of LoRA. Names and defaults are PEFT's.
struct LoraOptions {
  std::int64_t rank = 8;
  double alpha = 8;  ///< the adapter's term is multiplied by alpha / rank
  /// FQN patterns of the Linears and GroupedLinears that get an adapter (see matches_fqn):
  /// {"layers.*.attn.[qv]_proj", "**.experts.*"}.
  std::vector<std::string> targets{};
  double dropout = 0;  ///< probability of dropout on the adapter's input, in training only
};

/// Adds low-rank adapters (Hu et al. 2021) to the Linears that match `options.targets`: y = x
/// weight^T + bias + alpha / rank * B(A(dropout(x))). A and B are child modules of the Linear, with
/// PEFT's names: lora_A.weight (rank, in) and lora_B.weight (out, rank). Freezes all other
/// parameters of `module`. Call apply_lora() before parallelize_module and fully_shard, which then
/// shard the adapters like the weights: for a column-wise Linear the rows of B are split and A is
/// replicated, for a row-wise Linear the columns of A are split and B is replicated. The stacked
/// Linears of experts (GroupedLinear) get an A and a B for each expert, (experts, rank, in) and
/// (experts, out, rank), which apply_expert_parallel() splits like the weights.
///
/// init_weights fills A like a Linear's weight (Kaiming-uniform) and B with zeros. A table of
/// nn::Initializers in a parent module does not apply to A and B. If the model's weights were
/// loaded, call init_unfilled() to fill A and B. An FSDP unit reduces only the adapters' gradients.
///
/// Not collective. Throws Error, before anything is changed, for a rank below 1, a dropout outside
/// [0, 1), a pattern that matches no Linear or GroupedLinear, and a match that already has an
/// adapter, has a tied weight, or has a weight that is already distributed.
void apply_lora(ModuleBase& module, const LoraOptions& options);

/// Adds scale * B A to the weight of each Linear or expert with an adapter, and sets B to zero.
/// Outside of training the model's results do not change. Call merge_lora() before
/// save_hugging_face. Collective if parameters are distributed: A and B are gathered on every rank,
/// one Linear after another. Throws Error for a model without adapters, for uninitialized
/// parameters, and while an FSDP unit with such a weight is gathered.
void merge_lora(ModuleBase& module);

}  // namespace tessera::nn
TESSERA_API_END
