// Attention by libtorch's kernels. Composed (CompositeImplicitAutograd) and not a new kernel:
// libtorch's have gradients, rules and names for checkpoint policies already. libtorch chooses the
// kernel, unless unequal head counts would make it choose the slow one.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <atomic>
#include <limits>
#include <optional>
#include <vector>

#include "fused/attention_part.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/attention_kernel.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::detail {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

/// A tensor with the global sizes, so that all ranks choose alike: libtorch cannot choose for a
/// distributed tensor.
at::Tensor stand_in(const at::Tensor& tensor) {
  if (!tessera::is_distributed(tensor)) {
    return tensor;
  }
  // Kernels want the elements of a row one after another.
  const at::Tensor row = at::empty({tensor.size(-1)}, local_tensor(tensor).options());
  return row.requires_grad_(tensor.requires_grad()).expand(tensor.sizes());
}

AttentionKernel kernel_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          bool causal, const at::Tensor& mask, double dropout) {
  const at::Tensor seen = mask.defined() ? stand_in(mask) : mask;
  return choose_attention(stand_in(q), stand_in(k), stand_in(v),
                          backend_of_libtorch(causal, seen, dropout));
}

/// But for dropout: on a GPU a program that asks for it asks for the formula (docs/random.md).
bool in_training(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double dropout) {
  return c10::GradMode::is_enabled() && dropout == 0 && q.numel() > 0 &&
         (q.requires_grad() || k.requires_grad() || v.requires_grad());
}

/// Whether a call on a GPU repeats heads. On a CPU libtorch chooses all.
bool repeats_heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                   const at::Tensor& mask, double dropout) {
  const bool training = in_training(q, k, v, dropout);
  if (q.is_cpu() || (q.size(1) == k.size(1) && !training)) {
    return false;
  }
  const AttentionKernel kernel = kernel_of(q, k, v, causal, mask, dropout);
  if (training) {
    check_fused(kernel, q, k, mask.defined());
  }
  return kernel.repeats_heads;
}

at::Tensor run_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                         const OptionalTensor& mask, double dropout) {
  if (q.is_meta()) {
    // Only sizes; libtorch's C++ has no meta kernel for masking scores.
    return q.matmul(repeat_heads(k, q.size(1)).transpose(2, 3))
        .softmax(-1)
        .matmul(repeat_heads(v, q.size(1)));
  }
  if (repeats_heads(q, k, v, causal, mask.value_or(at::Tensor()), dropout)) {
    return at::scaled_dot_product_attention(q, repeat_heads(k, q.size(1)),
                                            repeat_heads(v, q.size(1)), mask, dropout, causal);
  }
  return at::scaled_dot_product_attention(q, k, v, mask, dropout, causal, std::nullopt,
                                          /*enable_gqa=*/q.size(1) != k.size(1));
}

/// As programs allow it, for all their threads.
std::atomic<bool>& math_is_allowed() {
  static std::atomic<bool> allowed = false;
  return allowed;
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  library.def(
      "attention(Tensor q, Tensor k, Tensor v, bool causal=False, Tensor? mask=None, "
      "float dropout=0.0) -> Tensor",
      &run_attention);
}

}  // namespace

at::Tensor window_term(const KeyWindow& window, const at::Tensor& q) {
  constexpr double kHidden = -std::numeric_limits<double>::infinity();
  const std::vector<std::int64_t> sizes{window.queries, window.keys};
  const at::Tensor after = at::full(sizes, kHidden, q.options()).triu_(window.own + 1);
  return after.add_(at::full(sizes, kHidden, q.options()).tril_(window.own - window.length));
}

at::Tensor repeat_heads(const at::Tensor& kv, std::int64_t heads) {
  // By views and one copy, so that heads stay split.
  return kv.unsqueeze(2).expand({-1, -1, heads / kv.size(1), -1, -1}).flatten(1, 2);
}

AskBackend backend_of_libtorch(bool causal, const at::Tensor& mask, double dropout) {
  return [causal, dropout, mask = optional_mask(mask)](const at::Tensor& q, const at::Tensor& k,
                                                       const at::Tensor& v) {
    return static_cast<at::SDPBackend>(at::_fused_sdp_choice(q, k, v, mask, dropout, causal,
                                                             std::nullopt, q.size(1) != k.size(1)));
  };
}

AttentionKernel choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const AskBackend& ask) {
  const at::SDPBackend as_given = ask(q, k, v);
  if (as_given != at::SDPBackend::math || q.is_cpu() || q.size(1) == k.size(1)) {
    return {as_given, false};
  }
  // The choice depends on sizes alone: a view has those of repeated heads, without the copy.
  const auto of_sizes = [&](const at::Tensor& kv) {
    return kv.slice(1, 0, 1).expand({-1, q.size(1), -1, -1});
  };
  const at::SDPBackend repeated = ask(q, of_sizes(k), of_sizes(v));
  return {repeated, repeated != at::SDPBackend::math};
}

void allow_math_attention(bool allowed) {
  math_is_allowed() = allowed;
}

void check_fused(const AttentionKernel& kernel, const at::Tensor& q, const at::Tensor& k,
                 bool masked) {
  TESSERA_CHECK(kernel.backend != at::SDPBackend::math || math_is_allowed(), "attention of ",
                q.size(1), " heads of ", q.size(3), " features over ", k.size(2), " tokens in ",
                q.scalar_type(), masked ? " with a mask" : "", " on ", q.device(),
                " has no fused kernel: training would keep all scores of each layer; train in "
                "bf16, fp16 or fp32 with heads of a multiple of 8 features, at most 256, or allow "
                "it: nn::allow_math_attention(), llama_train --allow-math-attention");
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                     const at::Tensor& mask, double dropout) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tessera::attention", "")
                             .typed<decltype(run_attention)>();
  return op.call(q, k, v, causal, optional_mask(mask), dropout);
}

}  // namespace tessera::detail
