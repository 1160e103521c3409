#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/export.h"
#include "tessera/nn/causal_attention.h"
#include "tessera/nn/context_parallel.h"
#include "tessera/nn/fused_linear.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/module.h"
#include "tessera/nn/norm.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// What an Attention calls its projections; by default as Hugging Face's Llama does.
struct AttentionNames {
  std::string query = "q_proj", key = "k_proj", value = "v_proj";
  std::string fused = "qkv_proj";  ///< one Linear in place of the three
  std::string output = "o_proj";
};

/// Options of an Attention.
struct AttentionOptions {
  std::int64_t hidden = 0;  ///< features of the input and of the result
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;  ///< key and value heads, which divide heads; 0: as many
  std::int64_t head_dim = 0;  ///< 0: hidden / heads
  bool qkv_bias = false, output_bias = false;
  /// Each head's queries and keys are normed (RMSNorm over head_dim): modules q_norm and k_norm.
  bool qk_norm = false;
  double norm_eps = 1e-6;
  /// One FusedLinear for queries, keys and values, as GPT-2 has it.
  bool fused_qkv = false;
  bool causal = true;
  std::int64_t window = 0;  ///< how many positions a query sees, its own included; 0: all
  double dropout = 0;       ///< on attention weights, in training (docs/random.md)
  /// Weights are initially normal(0, init_std), those of the output normal(0, output_init_std), or
  /// the same where that is 0; biases zero, norms one.
  double init_std = 0.02, output_init_std = 0;
  AttentionNames names{};
};

/// What a call of an Attention is given beside its input. A struct without visit_tensors, so that
/// hooks leave its tensors alone.
struct AttentionInputs {
  /// Sequences in an input that is folded to (batch * tokens, hidden). Folded matrix products are
  /// one aten::mm.
  std::int64_t batch = 0;
  /// Rotary tables of the positions (rotary_embedding): (tokens, head_dim), or (batch * tokens,
  /// head_dim) where each sequence has its own positions. Undefined: no rotary embedding.
  at::Tensor cos{}, sin{};
  /// As attention() takes it, in place of `causal` and `window`; undefined: these, which need none.
  at::Tensor mask{};
  /// The input's tokens are this rank's of sequences that are split: `cos` and `sin` are of their
  /// positions, and `mask` of these and of the whole sequence. Not with dropout.
  ContextParallelPtr context_parallel{};
  /// In place of a mask, where the sequences are documents. Causal. With context parallelism these
  /// are of the whole sequences.
  DocumentsPtr documents{};
};

/// Multi-head self-attention (Vaswani et al. 2017), with grouped key and value heads (Ainslie et
/// al. 2023), norms of queries and keys, rotary positions and a window by the options. x: (batch,
/// tokens, hidden), or folded; the result has the sizes of x.
///
/// Modules below: q_proj, k_proj, v_proj or qkv_proj, o_proj, and q_norm, k_norm; their styles for
/// tensor parallelism are tensor_parallel::attention_plan(). Each rank of it computes its heads, as
/// plain tensors; forward itself communicates nothing.
class Attention : public Module<Attention> {
 public:
  /// Throws Error for sizes that don't divide or are below 0, for a window of attention that is not
  /// causal, and unless 0 <= dropout < 1.
  explicit Attention(const AttentionOptions& options);
  at::Tensor forward(const at::Tensor& x, const AttentionInputs& inputs = {});
  void reset_parameters(const InitContext& init) override;

  /// With kv_heads and head_dim filled in.
  const AttentionOptions& options() const { return options_; }

 protected:
  /// Mixes the values: q, k, v (batch, heads, tokens, head_dim) -> as q. A derived class may keep
  /// keys and values (a cache); `inputs` are those of the call, of the caller's own type.
  virtual at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const AttentionInputs& inputs);

 private:
  /// (batch, tokens, heads, head_dim); queries and keys with their norms and positions.
  struct Heads {
    at::Tensor q, k, v;
  };
  Heads project(const at::Tensor& x, const AttentionInputs& inputs);
  Heads turned(const Heads& heads, const AttentionInputs& inputs);

  AttentionOptions options_;
  std::shared_ptr<Linear> query_, key_, value_, output_;
  std::shared_ptr<FusedLinear> fused_;        ///< in place of the first three
  std::shared_ptr<RMSNorm> q_norm_, k_norm_;  ///< with qk_norm
};

/// The options with kv_heads and head_dim filled in. Throws Error as Attention does.
AttentionOptions completed(AttentionOptions options);

}  // namespace tessera::nn
TESSERA_API_END
