#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/export.h"
#include "tessera/nn/functional.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Names of the projections in an Attention. The default names are those of Hugging Face's Llama.
struct AttentionNames {
  std::string query = "q_proj", key = "k_proj", value = "v_proj";
  std::string fused = "qkv_proj";  ///< name of the Linear for query, key and value, if fused
  std::string output = "o_proj";
};

/// Options of an Attention.
struct AttentionOptions {
  std::int64_t hidden = 0;  ///< number of features of the input and of the result
  std::int64_t heads = 0;
  /// Number of key and value heads, a divisor of `heads`; 0: as many as `heads`.
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;  ///< number of features of a head; 0: hidden / heads
  bool qkv_bias = false, output_bias = false;
  /// Whether the queries and keys of each head are normalised (RMSNorm over head_dim) by modules
  /// q_norm and k_norm.
  bool qk_norm = false;
  /// With qk_norm: whether one RMSNorm is over the features of all heads together, as in OLMoE.
  bool qk_norm_over_heads = false;
  double norm_eps = 1e-6;
  /// Whether one FusedLinear computes queries, keys and values, as in GPT-2.
  bool fused_qkv = false;
  bool causal = true;
  /// Number of positions that a query sees, including the query's own position; 0: all positions.
  std::int64_t window = 0;
  /// Dropout probability of the attention weights, in training only (docs/random.md).
  double dropout = 0;
  /// Initial weights come from normal(0, init_std). The output projection uses output_init_std
  /// instead, unless output_init_std is 0. Initial biases are 0, and initial weights of norms are
  /// 1.
  double init_std = 0.02, output_init_std = 0;
  AttentionNames names{};
};

/// Arguments of an Attention's forward in addition to the input. The hooks of FSDP and tensor
/// parallelism do not see these tensors, because the struct has no visit_tensors() function.
struct AttentionInputs {
  /// Number of sequences if the input is flattened to (batch * tokens, hidden); 0 if the input is
  /// (batch, tokens, hidden). Matrix products of 2-D inputs are single aten::mm calls.
  std::int64_t batch = 0;
  /// Rotary tables (see rotary_embedding): (tokens, head_dim), or (batch * tokens, head_dim) if
  /// each sequence has its own positions. If undefined, no rotary embedding is applied.
  at::Tensor cos{}, sin{};
  /// Mask for nn::attention(), used instead of `causal` and `window`. If undefined, `causal` and
  /// `window` apply.
  at::Tensor mask{};
  /// The ranks that share each sequence (context parallelism), or nullptr. The input, `cos` and
  /// `sin` then have only this rank's tokens. `mask` has a row for each of these tokens, and a
  /// column for each token of the sequence. Dropout above 0 in training throws Error.
  ContextParallelPtr context_parallel{};
  /// The boundaries of packed documents, used instead of a mask; attention must be causal. With
  /// context parallelism, `documents` describes the whole sequences.
  DocumentsPtr documents{};
};

/// Multi-head self-attention (Vaswani et al. 2017), optionally with grouped key and value heads
/// (Ainslie et al. 2023), norms of queries and keys, rotary positions and a window. x: (batch,
/// tokens, hidden), or flattened to (batch * tokens, hidden). The result has the sizes of x.
///
/// Child modules: q_proj, k_proj, v_proj or qkv_proj, o_proj, and q_norm, k_norm. Under tensor
/// parallelism (tensor_parallel::attention_plan()) each rank computes its own heads with plain
/// tensors.
class Attention : public Module<Attention> {
 public:
  /// Throws Error for invalid options: negative sizes, heads not a multiple of kv_heads, a window
  /// without `causal`, or a dropout outside [0, 1). If head_dim is 0, the hidden size must be a
  /// multiple of heads.
  explicit Attention(const AttentionOptions& options);
  at::Tensor forward(const at::Tensor& x, const AttentionInputs& inputs = {});
  void reset_parameters(const InitContext& init) override;

  /// Returns the options, with the actual numbers where kv_heads or head_dim were given as 0.
  const AttentionOptions& options() const { return options_; }

 protected:
  /// Returns softmax(q k^T) v, which has the sizes of q. q, k, v: (batch, heads, tokens, head_dim).
  /// `inputs`: the object that was passed to forward. Derived classes may override attend(), for
  /// example to cache keys and values.
  virtual at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const AttentionInputs& inputs);

 private:
  /// Queries, keys and values after norms and rotary embedding: (batch, tokens, heads, head_dim).
  struct Heads {
    at::Tensor q, k, v;
  };
  Heads project(const at::Tensor& x, const AttentionInputs& inputs);
  Heads turned(const Heads& heads, const AttentionInputs& inputs);

  AttentionOptions options_;
  std::shared_ptr<Linear> query_, key_, value_, output_;
  std::shared_ptr<FusedLinear> fused_;
  std::shared_ptr<RMSNorm> q_norm_, k_norm_;
};

namespace detail {

/// Returns `options`, with the actual numbers where kv_heads or head_dim are 0. Throws Error for
/// options that Attention's constructor refuses.
AttentionOptions completed(AttentionOptions options);

}  // namespace detail

/// Names of the Linears in an MLP. The default names are those of Hugging Face's Llama.
struct MlpNames {
  std::string gate = "gate_proj";  ///< name of the gate's Linear; used by SwiGlu only
  std::string up = "up_proj", down = "down_proj";
};

/// Options of a SwiGlu and a GeluMlp.
struct MlpOptions {
  std::int64_t hidden = 0;  ///< number of features of the input and of the result
  std::int64_t inner = 0;   ///< number of hidden features (out_features of up)
  bool bias = false;
  /// Weights are drawn from normal(0, init_std). The weight of `down` is drawn from normal(0,
  /// output_init_std), unless output_init_std is 0. Initial biases are 0.
  double init_std = 0.02, output_init_std = 0;
  MlpNames names{};
};

/// Computes down(silu(gate(x)) * up(x)) (Shazeer 2020): (..., hidden) -> (..., hidden).
/// tensor_parallel::swi_glu_plan() returns the parallel styles of the Linears; forward itself does
/// not communicate.
class SwiGlu : public Module<SwiGlu> {
 public:
  explicit SwiGlu(const MlpOptions& options);
  at::Tensor forward(const at::Tensor& x);

 private:
  void reset_parameters(const InitContext& init) override;

  MlpOptions options_;
  std::shared_ptr<Linear> gate_, up_, down_;
};

/// Computes down(gelu(up(x))) (Hendrycks & Gimpel 2016): (..., hidden) -> (..., hidden).
/// tensor_parallel::gelu_mlp_plan() returns the parallel styles of the Linears; forward itself does
/// not communicate.
class GeluMlp : public Module<GeluMlp> {
 public:
  /// `tanh`: whether to use GPT-2's tanh approximation of GELU instead of the error function.
  explicit GeluMlp(const MlpOptions& options, bool tanh = true);
  at::Tensor forward(const at::Tensor& x);

 private:
  void reset_parameters(const InitContext& init) override;

  MlpOptions options_;
  bool tanh_;
  std::shared_ptr<Linear> up_, down_;
};

}  // namespace tessera::nn
TESSERA_API_END
