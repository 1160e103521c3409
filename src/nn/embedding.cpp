#include "tessera/nn/embedding.h"

#include "tessera/nn/functional.h"
#include "tessera/nn/initialization.h"

namespace tessera::nn {

Embedding::Embedding(std::int64_t num_embeddings, std::int64_t embedding_dim)
    : num_embeddings_(num_embeddings), embedding_dim_(embedding_dim) {
  weight = register_slot("weight", {num_embeddings, embedding_dim});
}

at::Tensor Embedding::forward(const at::Tensor& indices) {
  return nn::embedding(weight, indices);
}

void Embedding::reset_parameters(const InitContext& init) {
  init.fill(weight, init::normal(0.0, 1.0));
}

}  // namespace tessera::nn
