#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/models/detail/positions.h"
#include "tessera/models/llama_config.h"
#include "tessera/models/parallelize.h"
#include "tessera/nn/functional.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize.h"

// The Llama decoder family: Llama 1 to 3.3, Mistral, Qwen 2 and Qwen 3, as LlamaConfig describes.
// Typical use:
//
//   const models::LlamaConfig config = models::read_config(folder / "config.json");
//   std::shared_ptr<models::Llama> model;
//   {
//     const nn::MetaDevice meta;  // allocates no memory
//     model = std::make_shared<models::Llama>(config, /*max_sequence=*/4096);
//   }
//   models::parallelize(*model, mesh, {});  // a mesh ("dp", "tp")
//   nn::to_empty(*model, c10::kCPU);        // this rank's shards
//   nn::init_weights(*model, seed);  // or nn::init_buffers() and checkpoint::load_hugging_face()
//   const at::Tensor logits = (*model)(tokens);
//   const at::Tensor loss = tensor_parallel::cross_entropy(logits, targets);

TESSERA_API_BEGIN
namespace tessera::models {

/// Arguments of the forward() that returns the loss without storing all logits in memory.
struct HeadLoss {
  at::Tensor targets;  ///< target tokens: (batch * sequence), int64
  tensor_parallel::LinearCrossEntropyOptions options{};
  at::Tensor positions{};        ///< like the argument `positions` of Llama::forward()
  nn::DocumentsPtr documents{};  ///< like the argument `documents` of Llama::forward()
};

/// A decoder: embedding, blocks of attention and MLP, final norm, head. Parameters have Hugging
/// Face's names, so that weights can be loaded and exported.
class Llama : public nn::Module<Llama>, public tensor_parallel::DeclaresPlan, public DeclaresUnits {
 public:
  /// `max_sequence`: number of positions that the rotary tables cover. `dropout`: probability,
  /// during training, of dropout on the outputs of attention and MLP.
  Llama(LlamaConfig config, std::int64_t max_sequence, double dropout = 0);

  /// Maps tokens, (batch, sequence) int64, to logits, (batch * sequence, vocabulary). With a cache,
  /// the first call gets the prompts, and each later call one token per text. Each call then
  /// returns only the last position's logits, (batch, vocabulary).
  ///
  /// `positions`, (batch, sequence) int64: the position of each token in its document, from 0. A
  /// token attends only to its own document. With context parallelism, `tokens` has this rank's
  /// tokens, and `positions` has all positions.
  ///
  /// Throws Error for more than max_sequence positions, and for a cache with `positions` or with
  /// context parallelism.
  at::Tensor forward(const at::Tensor& tokens, KvCache* cache = nullptr,
                     const at::Tensor& positions = {}, const nn::DocumentsPtr& documents = {});
  /// Returns the loss of the model's logits for `tokens`. Computes the output head and the loss
  /// together, without all logits in memory (linear_cross_entropy).
  at::Tensor forward(const at::Tensor& tokens, const HeadLoss& loss);
  /// Makes a cache for texts of at most `positions` positions, including `padding`. The first
  /// padding[i] positions of text i have no token, so that all texts end at the same position.
  KvCache new_cache(std::int64_t positions, std::vector<std::int64_t> padding = {0}) const;

  const LlamaConfig& config() const { return config_; }
  c10::Device device() const { return cos_->device(); }

  std::vector<nn::ModuleBase*> blocks() const override;
  /// The ranks over which sequences are split (context parallelism); nullptr: sequences are whole.
  const nn::ContextParallelPtr& context_parallel() const { return context_parallel_; }

 private:
  class Attention;
  class Block;
  class Backbone;

  /// Splits attention and MLP over heads and hidden features, and the embedding and the head by the
  /// vocabulary. Throws Error for a mesh over which the heads cannot be split.
  tensor_parallel::ParallelizePlan tensor_parallel_plan(
      const DeviceMesh& mesh, const tensor_parallel::DeclaredPlanOptions& options) const override;
  /// Returns the FSDP units: embedding; each block; final norm with head; and the root unit. With
  /// tied embeddings, the root unit has all parameters outside the blocks.
  std::vector<std::vector<nn::ModuleBase*>> fsdp_units() override;
  void set_context_parallel(const DeviceMesh& mesh) override;
  /// Initializes weights from a normal distribution truncated at 3 standard deviations, and norms
  /// with ones. Output projections of a model of L layers have a standard deviation smaller by
  /// sqrt(2 L). Also computes the rotary tables.
  void reset_parameters(const nn::InitContext& init) override;

  at::Tensor features(const at::Tensor& tokens, KvCache* cache, const at::Tensor& positions,
                      const nn::DocumentsPtr& documents);

  LlamaConfig config_;
  std::int64_t max_sequence_;
  std::shared_ptr<Backbone> model_;
  std::shared_ptr<nn::Linear> lm_head_;
  nn::Parameter cos_, sin_;  ///< rotary tables of sizes (max_sequence, head_dim), as buffers
  nn::ContextParallelPtr context_parallel_;
};

}  // namespace tessera::models
TESSERA_API_END
