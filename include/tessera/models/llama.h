#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/models/kv_cache.h"
#include "tessera/models/llama_config.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/context_parallel.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/mlp.h"
#include "tessera/nn/module.h"
#include "tessera/nn/norm.h"
#include "tessera/tensor_parallel/declared_plan.h"
#include "tessera/tensor_parallel/linear_cross_entropy.h"

TESSERA_API_BEGIN
namespace tessera::models {

/// The shape of a model's attention.
nn::AttentionOptions attention_options(const LlamaConfig& config);

/// What all blocks of one call share.
struct LlamaContext : nn::AttentionInputs {
  KvCache* cache = nullptr;  ///< generation only
};

/// What a training step asks of the model: the loss of its logits, which need not exist then.
struct HeadLoss {
  at::Tensor targets;  ///< (batch * sequence) int64
  tensor_parallel::LinearCrossEntropyOptions options{};
  at::Tensor positions{};  ///< of documents, as forward() takes them
};

/// The attention of these models, with a cache for generation. x: (tokens, hidden) folded, all
/// sequences of the batch one after another; so is the result.
class LlamaAttention : public nn::Attention {
 public:
  LlamaAttention(const LlamaConfig& config, int layer);

 private:
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const nn::AttentionInputs& inputs) override;

  std::size_t layer_;
};

/// Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)); in training with dropout of both sums.
class LlamaBlock : public nn::Module<LlamaBlock> {
 public:
  LlamaBlock(const LlamaConfig& config, int layer, double dropout);
  at::Tensor forward(const at::Tensor& x, const LlamaContext& context);

 private:
  at::Tensor drop(const at::Tensor& x) const;

  std::shared_ptr<nn::RMSNorm> input_layernorm_, post_attention_layernorm_;
  std::shared_ptr<LlamaAttention> self_attn_;
  std::shared_ptr<nn::SwiGlu> mlp_;
  double dropout_;
};

/// Embedding, blocks and final norm: "model" in Hugging Face's names.
class LlamaBackbone : public nn::Module<LlamaBackbone> {
 public:
  LlamaBackbone(const LlamaConfig& config, double dropout);
  /// tokens: (batch * sequence) -> (batch * sequence, hidden).
  at::Tensor forward(const at::Tensor& tokens, const LlamaContext& context);
  const std::vector<std::shared_ptr<LlamaBlock>>& blocks() const { return blocks_; }

 private:
  friend class Llama;
  std::shared_ptr<nn::Embedding> embed_tokens_;
  std::vector<std::shared_ptr<LlamaBlock>> blocks_;
  std::shared_ptr<nn::RMSNorm> norm_;
};

/// A Llama, or what differs from it by LlamaConfig's options, with Hugging Face's parameter names.
class Llama : public nn::Module<Llama>, public tensor_parallel::DeclaresPlan {
 public:
  /// `max_sequence`: positions that the rotary tables cover. `dropout`: the probability, in
  /// training.
  Llama(LlamaConfig config, std::int64_t max_sequence, double dropout = 0);
  /// tokens: (batch, sequence) int64 -> logits (batch * sequence, vocabulary). With a cache, the
  /// tokens follow those in it: first the prompts, then one token of each a call; the logits are
  /// those of the last position alone, (batch, vocabulary). `positions`: (batch, sequence) int64,
  /// of each token in its document: one more than the token before has, or 0 where a document
  /// begins. A token then attends to its own document alone; the mask takes batch * sequence^2
  /// bytes. Throws Error beyond max_sequence positions, and for positions with a cache or with
  /// angles that depend on how long a text is. With context parallelism the tokens are this rank's
  /// of each sequence, the positions those of all tokens, and there is no cache.
  at::Tensor forward(const at::Tensor& tokens, KvCache* cache = nullptr,
                     const at::Tensor& positions = {});
  /// Head and loss in one (linear_cross_entropy): the loss of the logits of the first.
  at::Tensor forward(const at::Tensor& tokens, const HeadLoss& loss);
  /// A cache for this model; see KvCache for the arguments.
  KvCache new_cache(std::int64_t positions, std::vector<std::int64_t> padding = {0}) const;

  const LlamaConfig& config() const { return config_; }
  c10::Device device() const { return cos_->device(); }
  /// From now on sequences are split over the ranks of the 1-D `mesh`.
  void set_context_parallel(const DeviceMesh& mesh);
  /// nullptr: they are not.
  const nn::ContextParallelPtr& context_parallel() const { return context_parallel_; }
  LlamaBackbone& backbone() { return *model_; }
  /// The modules of each FSDP unit, in the order for fully_shard: embedding, blocks, final norm
  /// with head, and the model, which has the rest. With tied embeddings that is all but the blocks.
  std::vector<std::vector<nn::ModuleBase*>> fsdp_units();
  /// Throws Error for a mesh that the heads cannot be shared out to.
  tensor_parallel::ParallelizePlan tensor_parallel_plan(
      const DeviceMesh& mesh, const tensor_parallel::DeclaredPlanOptions& options) const override;

  /// Truncated normal (3 standard deviations), norms ones, output projections scaled by depth;
  /// makes the rotary tables.
  void reset_parameters(const nn::InitContext& init) override;

 private:
  /// All but the head: (batch, sequence) -> (batch * sequence, hidden), with a cache (batch,
  /// hidden).
  at::Tensor features(const at::Tensor& tokens, KvCache* cache, const at::Tensor& positions);
  std::pair<at::Tensor, at::Tensor> rope(std::int64_t first, std::int64_t last) const;
  std::pair<at::Tensor, at::Tensor> rope_of_texts(const std::vector<std::int64_t>& padding,
                                                  std::int64_t first, std::int64_t last) const;
  at::Tensor window_mask(std::int64_t sequence);
  at::Tensor prompt_mask(const std::vector<std::int64_t>& padding, std::int64_t sequence) const;
  LlamaContext context_of(const at::Tensor& tokens, KvCache* cache);
  LlamaContext split_context(std::int64_t batch, std::int64_t sequence) const;
  LlamaContext document_context(const at::Tensor& positions, const at::Tensor& tokens,
                                const KvCache* cache) const;

  LlamaConfig config_;
  std::int64_t max_sequence_;
  std::shared_ptr<LlamaBackbone> model_;
  std::shared_ptr<nn::Linear> lm_head_;
  nn::Parameter cos_, sin_;  ///< rotary tables (max_sequence, head_dim), buffers
  at::Tensor window_mask_;   ///< of the last length that needed one
  nn::ContextParallelPtr context_parallel_;
};

}  // namespace tessera::models
TESSERA_API_END
