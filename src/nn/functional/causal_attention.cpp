// Causal attention of packed documents and within windows: what a mask would say is said by where
// documents begin, by a kernel's own window, or by which keys a call is given.

#include "tessera/nn/causal_attention.h"

#include <ATen/ops/_efficient_attention_forward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <utility>

#include "functional/local_heads.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/kernels/fake_mode.h"

namespace tessera::nn {
namespace {

/// Dimension of the tokens in (batch, heads, tokens, width).
constexpr std::int64_t kSequenceDim = 2;

/// (batch, tokens, ...) -> (batch * tokens, ...), all sequences one after another.
at::Tensor packed(const at::Tensor& by_heads) {
  return by_heads.transpose(1, kSequenceDim).flatten(0, 1);
}

/// The inverse, for the sizes of `like`.
at::Tensor unpacked(const at::Tensor& rows, const at::Tensor& like) {
  return rows.unflatten(0, {like.size(0), like.size(kSequenceDim)}).transpose(1, kSequenceDim);
}

// On a GPU.

/// The flash kernel takes a multiple of 8 features; more that are zero change no score.
at::Tensor padded(const at::Tensor& heads) {
  const std::int64_t missing = (8 - heads.size(-1) % 8) % 8;
  return missing == 0 ? heads : at::constant_pad_nd(heads, {0, missing});
}

at::Tensor by_flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const Documents* documents, std::int64_t window) {
  const auto given = [&](const at::Tensor& heads) {
    return padded(documents != nullptr ? packed(heads) : heads.transpose(1, kSequenceDim));
  };
  const auto offsets =
      documents != nullptr ? std::optional(documents->device_offsets()) : std::nullopt;
  const std::int64_t longest = documents != nullptr ? documents->longest() : q.size(kSequenceDim);
  // The kernel's windows leave out a query's own position; -1: none.
  const std::int64_t left = window > 0 ? window - 1 : -1;
  const std::int64_t right = window > 0 ? 0 : -1;
  const at::Tensor mixed = std::get<0>(at::_flash_attention_forward(
      given(q), given(k), given(v), offsets, offsets, longest, longest, /*dropout_p=*/0,
      /*is_causal=*/true, /*return_debug_mask=*/false,
      1 / std::sqrt(static_cast<double>(q.size(-1))), left, right));
  const at::Tensor own = mixed.slice(-1, 0, v.size(-1));
  return documents != nullptr ? unpacked(own, q) : own.transpose(1, kSequenceDim);
}

/// It takes no fewer key and value heads.
at::Tensor by_efficient(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const Documents& documents) {
  constexpr std::int64_t kCausal = 1;  // sdp::CustomMaskType::CausalFromTopLeft
  const auto given = [&](const at::Tensor& heads) {
    return packed(tessera::detail::repeat_heads(heads, q.size(1))).unsqueeze(0);
  };
  const auto offsets = std::optional(documents.device_offsets());
  const bool statistics =
      c10::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
  return unpacked(std::get<0>(at::_efficient_attention_forward(
                                  given(q), given(k), given(v), /*bias=*/std::nullopt, offsets,
                                  offsets, documents.longest(), documents.longest(),
                                  /*dropout_p=*/0, kCausal, statistics))
                      .squeeze(0),
                  q);
}

// In several calls.

/// Queries [first, first + count).
struct Block {
  std::int64_t first, count;
  /// Whether a window hides nothing from them that causality does not.
  bool is_causal(std::int64_t window) const { return first == 0 && count <= window; }
};

/// The first is causal alone, unless the window is small. Further ones of up to 512 queries have
/// the keys of `window` - 1 positions before them, which nobody sees all of.
std::vector<Block> blocks_of(std::int64_t tokens, std::int64_t window) {
  const std::int64_t most = std::clamp<std::int64_t>(window, 128, 512);
  std::vector<Block> blocks{{0, std::min(tokens, std::max(window, most))}};
  for (std::int64_t first = blocks[0].count; first < tokens; first += most) {
    blocks.push_back({first, std::min(most, tokens - first)});
  }
  return blocks;
}

at::Tensor by_blocks(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     std::int64_t window) {
  const std::vector<Block> blocks = blocks_of(q.size(kSequenceDim), window);
  std::vector<std::int64_t> counts;
  std::ranges::transform(blocks, std::back_inserter(counts), &Block::count);
  std::int64_t masked = 0;  // queries of the largest block with a mask
  for (const Block& block : blocks) {
    masked = std::max(masked, block.is_causal(window) ? 0 : block.count);
  }
  // For `window` - 1 keys before a block, and its own.
  const at::Tensor mask = tessera::detail::window_term(
      {.queries = masked, .keys = masked + window - 1, .own = window - 1, .length = window}, q);
  const std::vector<at::Tensor> queries = q.split_with_sizes(counts, kSequenceDim);
  std::vector<at::Tensor> mixed;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const auto [first, count] = blocks[i];
    const std::int64_t begin = std::max<std::int64_t>(0, first - window + 1);
    const std::int64_t keys = first + count - begin;
    const bool causal = blocks[i].is_causal(window);
    const at::Tensor seen =
        causal ? at::Tensor()
               : mask.narrow(0, 0, count).narrow(1, begin - (first - window + 1), keys);
    mixed.push_back(attention(queries[i], k.narrow(kSequenceDim, begin, keys),
                              v.narrow(kSequenceDim, begin, keys), causal, seen));
  }
  return at::cat(mixed, kSequenceDim);
}

at::Tensor in_window(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     std::int64_t window) {
  return window > 0 && window < q.size(kSequenceDim) ? by_blocks(q, k, v, window)
                                                     : attention(q, k, v, /*causal=*/true);
}

/// Split at once, so that the gradients are joined at once.
at::Tensor by_documents(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const Documents& documents, std::int64_t window) {
  const auto split = [lengths = documents.lengths()](const at::Tensor& heads) {
    return packed(heads).split_with_sizes(lengths, 0);
  };
  const auto one = [](const at::Tensor& rows) { return rows.transpose(0, 1).unsqueeze(0); };
  const std::vector<at::Tensor> queries = split(q), keys = split(k), values = split(v);
  std::vector<at::Tensor> mixed;
  for (std::size_t i = 0; i < queries.size(); ++i) {
    mixed.push_back(in_window(one(queries[i]), one(keys[i]), one(values[i]), window)
                        .squeeze(0)
                        .transpose(0, 1));
  }
  return unpacked(at::cat(mixed), q);
}

at::Tensor by_mask(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const CausalAttentionOptions& options) {
  const at::Tensor mask = options.documents != nullptr
                              ? options.documents->mask(options.window)
                              : causal_mask(q.size(kSequenceDim), options.window, q.device());
  return attention(q, k, v, /*causal=*/false, mask, options.dropout);
}

at::Tensor on_gpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const CausalAttentionOptions& options) {
  const Documents* documents = options.documents.get();
  switch (packed_kernel(choose_attention(q, k, v, backend_of_libtorch(/*causal=*/true))).backend) {
    case at::SDPBackend::flash_attention:
      return by_flash(q, k, v, documents, options.window);
    case at::SDPBackend::efficient_attention:
      // The gradient of its own window is wrong before libtorch 2.15.
      if (options.window == 0) {
        return by_efficient(q, k, v, *documents);
      }
      return documents == nullptr ? by_blocks(q, k, v, options.window) : by_mask(q, k, v, options);
    default:
      return by_mask(q, k, v, options);
  }
}

/// The options of the same call, without what lets each query see all keys up to itself.
CausalAttentionOptions needed(CausalAttentionOptions options, std::int64_t tokens) {
  if (options.documents != nullptr && options.documents->are_sequences()) {
    options.documents = nullptr;
  }
  const std::int64_t longest = options.documents != nullptr ? options.documents->longest() : tokens;
  if (options.window >= longest) {
    options.window = 0;
  }
  return options;
}

}  // namespace

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const CausalAttentionOptions& options) {
  check_attention("causal attention", q, k, v, options.window);
  if (options.documents != nullptr) {
    options.documents->check_sequences(q.size(0), q.size(kSequenceDim));
  }
  const CausalAttentionOptions own = needed(options, q.size(kSequenceDim));
  const bool plain = own.documents == nullptr && own.window == 0;
  // A step on a GPU is planned on a CPU, whose kernels have no windows.
  if (plain || q.is_meta() || kernels::fake_device() == c10::DeviceType::CUDA) {
    return attention(q, k, v, /*causal=*/true, {}, own.dropout);
  }
  if (own.dropout > 0) {
    return by_mask(q, k, v, own);
  }
  if (tessera::is_distributed(q)) {
    return attend_to_local_heads(
        "causal attention with a window or documents", /*by_batch=*/false, q, k, v,
        [&](const at::Tensor& local_q, const at::Tensor& local_k, const at::Tensor& local_v) {
          return causal_attention(local_q, local_k, local_v, own);
        });
  }
  if (q.is_cuda()) {
    return on_gpu(q, k, v, own);
  }
  return own.documents != nullptr ? by_documents(q, k, v, *own.documents, own.window)
                                  : by_blocks(q, k, v, own.window);
}

AttentionKernel packed_kernel(AttentionKernel kernel) {
  if (kernel.backend == at::SDPBackend::cudnn_attention) {
    kernel.backend = at::SDPBackend::flash_attention;
  }
  return kernel;
}

}  // namespace tessera::nn
