#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Looks up rows of a table: indices (...) int64 -> (..., embedding_dim). weight: (num_embeddings,
/// embedding_dim), initially normal(0, 1).
///
/// With a distributed weight the result is distributed on the same mesh. Weight Shard(0), sharded
/// over the vocabulary, gives Partial: each rank contributes the rows of its shard, and zeros for
/// other rows. Weight Shard(1) gives Shard(-1). forward does not communicate, and throws Error for
/// the arguments that nn::embedding refuses. The comment of nn::embedding describes the gradient.
class Embedding : public Module<Embedding> {
 public:
  Embedding(std::int64_t num_embeddings, std::int64_t embedding_dim);
  at::Tensor forward(const at::Tensor& indices);
  void reset_parameters(const InitContext& init) override;

  std::int64_t num_embeddings() const { return num_embeddings_; }
  std::int64_t embedding_dim() const { return embedding_dim_; }

  Parameter weight;

 private:
  std::int64_t num_embeddings_;
  std::int64_t embedding_dim_;
};

}  // namespace tessera::nn
TESSERA_API_END
