#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/nn/module.h"

namespace tessera::nn {

/// Rows of a table: indices (...) int64 -> (..., dim). weight: (num, dim), initially normal(0, 1).
///
/// With a distributed weight the result lies on its mesh: split over the vocabulary (Shard(0)) it
/// is Partial, each rank adding the rows it has and zeros for the others'; Shard(1) gives
/// Shard(-1). See nn::embedding.
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
