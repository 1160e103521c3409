// What attention needs of a call beside activations: the angles of its positions, and which
// positions a query sees.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/models/kv_cache.h"
#include "tessera/models/llama_config.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/context_parallel.h"

namespace tessera::models {

/// What all blocks of one call share.
struct Context : nn::AttentionInputs {
  KvCache* cache = nullptr;  ///< generation only
};

/// What the contexts of a model's calls are made of.
struct ContextParts {
  const LlamaConfig& config;
  const at::Tensor& cos;  ///< rotary tables (positions, head_dim)
  const at::Tensor& sin;
  const nn::ContextParallelPtr& context_parallel;
};

/// For tokens (batch, sequence) that follow those in the cache, if there is one. Throws Error for a
/// cache of another number of texts.
Context context_of(const ContextParts& parts, const at::Tensor& tokens, KvCache* cache);
/// Where tokens are in documents, and these; without them they are made of the positions.
struct InDocuments {
  const at::Tensor& positions;  ///< (batch, sequence)
  const nn::DocumentsPtr& documents;
};
/// The same for tokens of documents. Throws Error for a cache, and where the sizes differ.
Context document_context(const ContextParts& parts, const at::Tensor& tokens,
                         const InDocuments& places, const KvCache* cache);

}  // namespace tessera::models
