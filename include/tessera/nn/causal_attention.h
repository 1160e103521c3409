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

/// Sequences that are documents one after another, of which a token sees its own alone. Where the
/// documents begin says as much as a mask of (batch, tokens, tokens). Made once for all layers.
class Documents {
 public:
  /// `positions`: (batch, tokens) int64, of each token in its document, so 0 where one begins; a
  /// sequence begins one in any case. They are read on the host: if a GPU has them, the caller
  /// waits for it. `device`: that of attention.
  Documents(const at::Tensor& positions, c10::Device device);

  /// Where documents begin among the tokens of all sequences, one sequence after another; last the
  /// number of these tokens.
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

/// What a query of causal_attention() sees of the keys up to itself.
struct CausalAttentionOptions {
  std::int64_t window = 0;   ///< how many positions, its own included; 0: all
  DocumentsPtr documents{};  ///< those of its document alone; nullptr: of its sequence
  double dropout = 0;        ///< takes a mask, if there is a window or documents
};

/// attention() with a causal flag, without a mask for a window or for documents. q: (batch, heads,
/// tokens, width); k, v: the same with as many heads, or fewer, which divide them; returns as q.
/// Plain, or distributed and split by heads alone.
///
/// On a GPU documents are variable-length attention, of the flash kernel (Dao 2023) or in fp32 of
/// the memory-efficient one, and a window is the flash kernel's own. On a CPU each document is a
/// call; so is each block of queries with the keys that its window reaches, which is also what fp32
/// on a GPU does. What no fused kernel takes is computed with a mask. Throws Error for keys, values
/// or documents of other sizes than q's, and for a window below 0.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const CausalAttentionOptions& options = {});

/// The kernel of causal_attention() with documents or a window, where `kernel` is that without.
AttentionKernel packed_kernel(AttentionKernel kernel);

}  // namespace tessera::nn
TESSERA_API_END
