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

/// Computes y = x weight^T + bias: (..., in) -> (..., out). weight: (out, in), bias: (out), both
/// initially uniform in ±1/sqrt(in), as in torch.nn.Linear. forward has the collectives, gradients
/// and exceptions of aten::linear (docs/sharding_rules.md).
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

/// Calls each of `linears` with x, in order. Exceptions and collectives are those of separate
/// calls. Where possible, backward adds the gradients of x in place, in another order than separate
/// calls.
std::vector<at::Tensor> linear_products(const at::Tensor& x,
                                        const std::vector<std::reference_wrapper<Linear>>& linears);

/// Looks up rows of a table: indices (...) int64 -> (..., embedding_dim). weight: (num_embeddings,
/// embedding_dim), initially normal(0, 1). A weight with Shard(0) gives a Partial result, a weight
/// with Shard(1) a result with Shard(-1). forward does not communicate. Gradient and Errors: see
/// nn::embedding.
class Embedding : public Module<Embedding> {
 public:
  Embedding(std::int64_t num_embeddings, std::int64_t embedding_dim);
  at::Tensor forward(const at::Tensor& indices);

  Parameter weight;

 private:
  void reset_parameters(const InitContext& init) override;
};

/// Computes x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019).
/// weight: (size), initially ones. Statistics are fp32, or fp64 for fp64 inputs. forward does not
/// communicate. Gradients and Errors: see nn::rms_norm.
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

/// Computes (x - mean) / sqrt(var + eps) * weight + bias over the last dimension (Ba et al. 2016).
/// weight, bias: (size), initially ones and zeros. forward has the collectives, gradients and
/// exceptions of aten::layer_norm (docs/sharding_rules.md).
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

/// In training, zeroes each element with probability p and scales the other elements by 1/(1-p).
/// Outside of training, or for p = 0, returns x itself. The gradient uses the mask of the forward.
///
/// The mask depends on the module's key, the number of calls and the element's global index. The
/// mask is therefore the same on every mesh. init_weights or set_key sets the key; otherwise the
/// module's name determines the key. In a forward with fully_shard, the ranks first exchange their
/// numbers of rows (docs/random.md). Thread safety: one thread at a time.
class Dropout : public Module<Dropout>, public detail::DropoutState {
 public:
  /// The constructor throws Error unless 0 <= p < 1.
  explicit Dropout(double p = 0.5);
  /// Throws Error if x is Partial, or is plain with an unknown position in the global tensor.
  /// Throws Error if this Dropout has no key and no name, because no module has registered this
  /// Dropout as a child.
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
  /// Number of equal groups of the weight's rows. Each group has equally many rows of every part.
  /// For grouped-query attention, use the number of key and value heads: each tensor-parallel rank
  /// then gets whole groups of one key head, one value head and their query heads.
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

/// Replaces several Linears of one input by a larger Linear: query, key and value, or gate and up.
/// Files contain the parts under their own names:
///
///   nn::FusedLinear qkv(dim, {{"q_proj", heads * size}, {"k_proj", kv_heads * size},
///                             {"v_proj", kv_heads * size}}, {.bias = false, .groups = kv_heads});
///   const std::vector<at::Tensor> parts = qkv.split(qkv(x));  // q, k, v
///
/// For tensor parallelism use fused_colwise_parallel. The order of rows is that of linear_qkv in
/// Megatron-LM.
class FusedLinear : public Linear, public detail::FusedParts {
 public:
  /// The constructor throws Error if `groups` does not divide a part's out_features.
  FusedLinear(std::int64_t in_features, std::vector<FusedPart> parts,
              FusedLinearOptions options = {});

  /// Splits a result of forward, or this rank's shard of a result, into its parts, (...,
  /// out_features) each. The parts are views if `groups` is 1.
  std::vector<at::Tensor> split(const at::Tensor& output) const;
};

/// Options of convert_to_fp8().
struct Fp8Options {
  /// FQN patterns of Linears that are not converted (see matches_fqn): {"lm_head"}.
  std::vector<std::string> exclude{};
  /// Both sizes of a converted weight must be multiples of this number; other Linears are skipped.
  /// at::_scaled_mm requires 16. With tensor parallelism use 16 * ranks, as shards need such sizes,
  /// too.
  std::int64_t multiple_of = 16;
};

/// Experimental, until a GPU shows a speed-up of at least 1.15 at hidden size 4096.
///
/// Makes the Linears below `module` compute the products of forward and backward in float8_e4m3fn,
/// with a scale for each row and column (docs/fp8.md). Parameters keep their dtype. A GPU needs
/// bf16 as computation dtype. Call convert_to_fp8() before apply_lora, parallelize_module and
/// fully_shard.
///
/// Returns the FQNs of the converted Linears. Excluded Linears, tied weights and unsuitable sizes
/// are skipped. Not collective; every rank must convert the same Linears. Throws Error, before any
/// change, for a pattern without a match. Throws Error for a Linear that is already converted, has
/// an adapter, or has a distributed weight.
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

/// Adds LoRA adapters (Hu et al. 2021) to the Linears that match `options.targets`: y = x weight^T
/// + bias + alpha / rank * B(A(dropout(x))). Freezes all other parameters of `module`. A and B are
/// child modules with PEFT's names: lora_A.weight (rank, in) and lora_B.weight (out, rank). Each
/// expert of a GroupedLinear has its own A and B.
///
/// Call apply_lora() before parallelize_module and fully_shard, which also shard the adapters.
/// init_weights fills A like a Linear's weight and B with zeros. For a model with loaded weights,
/// call init_unfilled() instead.
///
/// Not collective. Throws Error, before any change, for a pattern without a match, a rank below 1,
/// or a dropout outside [0, 1). Throws Error for a tied or distributed weight, and for a second
/// adapter.
void apply_lora(ModuleBase& module, const LoraOptions& options);

/// Adds scale * B A to each weight with an adapter, and sets B to zero. Call merge_lora() before
/// save_hugging_face. Collective if parameters are distributed: every rank gathers A and B. Throws
/// Error for a model without adapters, uninitialized parameters, and weights that FSDP has
/// gathered.
void merge_lora(ModuleBase& module);

}  // namespace tessera::nn
TESSERA_API_END
