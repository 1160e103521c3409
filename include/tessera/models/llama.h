#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/models/llama_config.h"
#include "tessera/models/parallelize.h"
#include "tessera/nn/causal_attention.h"
#include "tessera/nn/context_parallel.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/declared_plan.h"
#include "tessera/tensor_parallel/linear_cross_entropy.h"

TESSERA_API_BEGIN
namespace tessera::models {

/// Keys and values of the positions so far of a batch of texts, in memory that is allocated once. A
/// model with a sliding window keeps the last `window` positions in a ring.
class KvCache {
 public:
  /// The cached keys and values of one layer.
  struct Layer {
    at::Tensor keys, values;  ///< (batch, heads, slots, head_dim), or what attention reads of them
  };

  /// For texts of at most `positions` positions, `padding` included: of text i the first padding[i]
  /// hold no token, so that texts of different lengths end together. `window`: 0 for none.
  KvCache(std::int64_t positions, std::int64_t window, std::vector<std::int64_t> padding = {0});

  /// The largest number of positions, and the number so far.
  std::int64_t positions() const { return positions_; }
  std::int64_t tokens() const { return tokens_; }
  const std::vector<std::int64_t>& padding() const { return padding_; }
  bool padded() const;

  /// Appends the keys and values, (batch, heads, tokens, head_dim), of the next positions. Returns
  /// those that the queries of these positions attend to: of a prompt, the first call, its own;
  /// else all in the cache.
  Layer append(std::size_t layer, const at::Tensor& keys, const at::Tensor& values);
  /// Call it when all layers have appended `count` positions.
  void advance(std::int64_t count) { tokens_ += count; }

  /// Which of the keys that append() returns for one position the query may see, as a mask of
  /// (batch, 1, 1, keys); undefined: all of them.
  at::Tensor mask(c10::Device device) const;

 private:
  Layer& layer_like(std::size_t layer, const at::Tensor& keys);
  void write(const at::Tensor& slots, const at::Tensor& values) const;

  std::int64_t positions_, slots_;
  std::vector<std::int64_t> padding_;
  std::int64_t tokens_ = 0;
  std::vector<Layer> layers_;
};

}  // namespace tessera::models

// The decoder family: Llama 1 to 3.3, and Mistral, Qwen 2 and Qwen 3, which differ from it by what
// LlamaConfig says. The model itself is in src/models/llama.cpp, top to bottom; here is what a
// program does with it:
//
//   const models::LlamaConfig config = models::read_config(folder / "config.json");
//   std::shared_ptr<models::Llama> model;
//   {
//     const nn::MetaDevice meta;  // no memory yet
//     model = std::make_shared<models::Llama>(config, /*max_sequence=*/4096);
//   }
//   models::parallelize(*model, mesh, {});  // a mesh ("dp", "tp")
//   nn::to_empty(*model, c10::kCPU);        // this rank's shards
//   nn::init_weights(*model, seed);  // or nn::init_buffers() and checkpoint::load_hugging_face()
//   const at::Tensor logits = (*model)(tokens);
//   const at::Tensor loss = tensor_parallel::cross_entropy(logits, targets);

namespace tessera::models {

/// For the forward() that returns the loss, without the whole logits.
struct HeadLoss {
  at::Tensor targets;  ///< (batch * sequence) int64
  tensor_parallel::LinearCrossEntropyOptions options{};
  at::Tensor positions{};        ///< in documents, as forward() takes them
  nn::DocumentsPtr documents{};  ///< the same
};

/// A decoder with Hugging Face's parameter names, by which weights are loaded and exported:
/// embedding, blocks of attention and MLP, final norm, head.
class Llama : public nn::Module<Llama>, public tensor_parallel::DeclaresPlan, public DeclaresUnits {
 public:
  /// `max_sequence`: positions that the rotary tables cover. `dropout`: the probability, in
  /// training, of what attention and MLP add.
  Llama(LlamaConfig config, std::int64_t max_sequence, double dropout = 0);

  /// tokens: (batch, sequence) int64 -> logits (batch * sequence, vocabulary). With a cache, the
  /// tokens follow those in it: first the prompts, then one token of each a call; the logits are
  /// those of the last position alone, (batch, vocabulary). `positions`: (batch, sequence) int64,
  /// of each token in its document: one more than the token before has, or 0 where a document
  /// begins. A token then attends to its own document alone; the host reads the positions, for
  /// which it waits for a GPU. Throws Error beyond max_sequence positions, and for positions with a
  /// cache or with angles that depend on how long a text is. With context parallelism the tokens
  /// are this rank's of each sequence, the positions those of all tokens, and there is no cache.
  at::Tensor forward(const at::Tensor& tokens, KvCache* cache = nullptr,
                     const at::Tensor& positions = {});
  /// The same with the documents of the positions, which the host need not read then.
  at::Tensor forward(const at::Tensor& tokens, KvCache* cache, const at::Tensor& positions,
                     const nn::DocumentsPtr& documents);
  /// Head and loss in one (linear_cross_entropy): the loss of what the other forward() returns.
  at::Tensor forward(const at::Tensor& tokens, const HeadLoss& loss);
  /// A cache for this model; see KvCache for the arguments.
  KvCache new_cache(std::int64_t positions, std::vector<std::int64_t> padding = {0}) const;

  const LlamaConfig& config() const { return config_; }
  c10::Device device() const { return cos_->device(); }

  /// Column-wise into each half of a block and row-wise out of it, the embedding and the head by
  /// the vocabulary. Throws Error for a mesh that the heads cannot be shared out to.
  tensor_parallel::ParallelizePlan tensor_parallel_plan(
      const DeviceMesh& mesh, const tensor_parallel::DeclaredPlanOptions& options) const override;
  std::vector<nn::ModuleBase*> blocks() const override;
  /// Embedding, blocks, final norm with head, and the model, which has the rest. With tied
  /// embeddings the rest is all but the blocks.
  std::vector<std::vector<nn::ModuleBase*>> fsdp_units() override;
  void set_context_parallel(const DeviceMesh& mesh) override;
  /// nullptr: sequences are not split.
  const nn::ContextParallelPtr& context_parallel() const { return context_parallel_; }

  /// Truncated normal (3 standard deviations), norms ones, output projections scaled by depth;
  /// makes the rotary tables.
  void reset_parameters(const nn::InitContext& init) override;

 private:
  class Attention;
  class Block;
  class Backbone;

  at::Tensor features(const at::Tensor& tokens, KvCache* cache, const at::Tensor& positions,
                      const nn::DocumentsPtr& documents);

  LlamaConfig config_;
  std::int64_t max_sequence_;
  std::shared_ptr<Backbone> model_;
  std::shared_ptr<nn::Linear> lm_head_;
  nn::Parameter cos_, sin_;  ///< rotary tables (max_sequence, head_dim), buffers
  nn::ContextParallelPtr context_parallel_;
};

}  // namespace tessera::models
TESSERA_API_END
