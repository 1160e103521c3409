#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/attention_kernel.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Sequences of packed documents: a token sees only its own document. The starts of the documents
/// replace a mask of (batch, tokens, tokens). Made once for all layers.
class Documents {
 public:
  /// `positions`: (batch, tokens) int64, the position of each token in its document: 0 starts a
  /// document. A sequence starts one in any case. Read on the host, which waits for a GPU.
  /// `device`: of attention.
  Documents(const at::Tensor& positions, c10::Device device);

  /// The starts of documents among the tokens of all sequences, one sequence after another, and
  /// the number of these tokens.
  const std::vector<std::int64_t>& offsets() const { return offsets_; }
  /// The same on the device, int32, as variable-length kernels take it.
  const at::Tensor& device_offsets() const { return device_offsets_; }
  std::vector<std::int64_t> lengths() const;
  /// Throws Error, which begins with "attention", unless these are of `batch` sequences of
  /// `tokens`.
  void check_sequences(std::int64_t batch, std::int64_t tokens) const;
  /// The length of the longest.
  std::int64_t longest() const { return longest_; }
  /// Whether each sequence is one document, so that a causal flag says it all.
  bool are_sequences() const { return std::ssize(offsets_) <= batch_ + 1; }
  /// The mask that says the same: (batch, 1, tokens, tokens), as causal_mask(). Made in each call.
  at::Tensor mask(std::int64_t window = 0) const;

 private:
  std::int64_t batch_, tokens_;
  std::vector<std::int64_t> offsets_;
  at::Tensor device_offsets_;
  std::int64_t longest_ = 0;
};
/// Shared by the layers of a call.
using DocumentsPtr = std::shared_ptr<const Documents>;

/// The keys, up to its own position, that a query of causal_attention() sees.
struct CausalAttentionOptions {
  std::int64_t window = 0;   ///< how many positions, its own included; 0: all
  DocumentsPtr documents{};  ///< those of its document alone; nullptr: of its sequence
  double dropout = 0;        ///< takes a mask, if there is a window or documents
};

/// attention() with a causal flag, without a mask for a window or for documents. q: (batch, heads,
/// tokens, width); k, v: the same with as many heads, or fewer, which divide them; returns as q.
/// Plain, or distributed and split by heads alone.
///
/// On a GPU documents use variable-length attention: the flash kernel (Dao 2023), in fp32 the
/// memory-efficient kernel. A window is an option of the flash kernel. On a CPU, each document is
/// one call, and each block of queries is one call with the keys in its window; so is a window in
/// fp32 on a GPU. Other cases use a mask. Throws Error for keys, values or documents of other sizes
/// than q's, and for a window below 0.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const CausalAttentionOptions& options = {});

/// The kernel of causal_attention() with documents or a window, where `kernel` is that without.
AttentionKernel packed_kernel(AttentionKernel kernel);

}  // namespace tessera::nn
TESSERA_API_END
