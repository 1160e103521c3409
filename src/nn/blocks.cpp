// The blocks of language models: Attention, SwiGlu, GeluMlp.

#include "tessera/nn/blocks.h"

#include <ATen/ops/gelu.h>

#include <initializer_list>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/functional.h"
#include "tessera/nn/initialization.h"

namespace tessera::nn {

namespace {

/// Fills the weights of the Linears in `in` (skips nullptr) from normal(0, std), and of `out` from
/// normal(0, out_std), or std if out_std is not positive. Sets biases to zero.
void fill_linears(const InitContext& init, std::initializer_list<const Linear*> in,
                  const Linear& out, double std, double out_std) {
  const auto fill = [&](const Linear& linear, double own_std) {
    init.fill(linear.weight, init::normal(0, own_std));
    if (linear.bias.defined()) {
      init.fill(linear.bias, init::zeros());
    }
  };
  for (const Linear* linear : in) {
    if (linear != nullptr) {
      fill(*linear, std);
    }
  }
  fill(out, out_std > 0 ? out_std : std);
}

// Self-attention. The number of heads is derived from the sizes of the projections' results. With
// tensor parallelism, these are the heads of this rank.

/// Reshapes x, (batch, tokens, ...), to fit the rotary tables: to (1, batch * tokens, ...) if the
/// tables have a row for every token of the batch.
at::Tensor along_tables(const at::Tensor& x, const AttentionInputs& inputs) {
  return inputs.cos.size(0) == x.size(1) ? x : x.flatten(0, 1).unsqueeze(0);
}

at::Tensor as_batch(const at::Tensor& x, const at::Tensor& like) {
  return x.size(1) == like.size(1) ? x : x.squeeze(0).unflatten(0, {like.size(0), like.size(1)});
}

at::Tensor normed(const at::Tensor& x, const std::shared_ptr<RMSNorm>& norm) {
  return norm == nullptr ? x : (*norm)(x);
}

/// Returns the norm of x over the features of all heads, in the layout of `x`. The norm gathers the
/// heads of all ranks.
at::Tensor normed_over_heads(const at::Tensor& x, const std::shared_ptr<RMSNorm>& norm) {
  const at::Tensor result = normed(x, norm);
  return tessera::is_distributed(x) && tessera::is_distributed(result)
             ? DistributedTensor(result).redistribute(sharding_spec(x).layout)
             : result;
}

}  // namespace

AttentionOptions detail::completed(AttentionOptions options) {
  TESSERA_CHECK(options.hidden > 0 && options.heads > 0, "an Attention with ", options.heads,
                " heads and ", options.hidden, " features is invalid; both must be 1 or more");
  TESSERA_CHECK(options.kv_heads >= 0 && options.head_dim >= 0 && options.window >= 0,
                "an Attention with ", options.kv_heads, " key and value heads, heads of ",
                options.head_dim, " features and a window of ", options.window,
                " is invalid; no number may be negative");
  TESSERA_CHECK(options.dropout >= 0 && options.dropout < 1, "an Attention with a dropout of ",
                options.dropout, " is invalid; it must be 0 or more, and below 1");
  if (options.kv_heads == 0) {
    options.kv_heads = options.heads;
  }
  TESSERA_CHECK(options.heads % options.kv_heads == 0, "an Attention with ", options.heads,
                " heads and ", options.kv_heads,
                " key and value heads is invalid; heads must be a multiple of kv_heads");
  if (options.head_dim == 0) {
    TESSERA_CHECK(options.hidden % options.heads == 0, "an Attention with ", options.heads,
                  " heads can't divide ", options.hidden, " features evenly; set head_dim");
    options.head_dim = options.hidden / options.heads;
  }
  TESSERA_CHECK(!options.qk_norm_over_heads || (options.qk_norm && !options.fused_qkv),
                "an Attention with qk_norm_over_heads ",
                options.qk_norm ? "and fused_qkv" : "but without qk_norm",
                " is invalid; qk_norm_over_heads needs qk_norm and separate projections");
  TESSERA_CHECK(options.window == 0 || options.causal, "an Attention got a window of ",
                options.window,
                " without causal; set causal, or leave out the window and pass a mask");
  return options;
}

Attention::Attention(const AttentionOptions& options) : options_(detail::completed(options)) {
  const AttentionOptions& o = options_;
  const std::int64_t q = o.heads * o.head_dim, kv = o.kv_heads * o.head_dim;
  const AttentionNames& names = o.names;
  const auto linear = [&](const std::string& name, std::int64_t out) {
    return register_module(
        name, std::make_shared<Linear>(o.hidden, out, LinearOptions{.bias = o.qkv_bias}));
  };
  if (o.fused_qkv) {
    // A group of rows has one key head and its query heads; tensor parallelism never splits a
    // group.
    const std::vector<FusedPart> parts{{names.query, q}, {names.key, kv}, {names.value, kv}};
    fused_ = register_module(
        names.fused,
        std::make_shared<FusedLinear>(
            o.hidden, parts, FusedLinearOptions{.bias = o.qkv_bias, .groups = o.kv_heads}));
  } else {
    query_ = linear(names.query, q);
    key_ = linear(names.key, kv);
    value_ = linear(names.value, kv);
  }
  output_ = register_module(
      names.output, std::make_shared<Linear>(q, o.hidden, LinearOptions{.bias = o.output_bias}));
  if (o.qk_norm) {
    const bool whole = o.qk_norm_over_heads;
    q_norm_ =
        register_module("q_norm", std::make_shared<RMSNorm>(whole ? q : o.head_dim, o.norm_eps));
    k_norm_ =
        register_module("k_norm", std::make_shared<RMSNorm>(whole ? kv : o.head_dim, o.norm_eps));
  }
}

Attention::Heads Attention::project(const at::Tensor& x, const AttentionInputs& inputs) {
  const auto heads = [&](const at::Tensor& t, at::IntArrayRef sizes) {
    // A rank may have no tokens: unflatten() cannot derive a size given as -1 for an empty tensor.
    const at::Tensor unfolded =
        x.dim() == 2 ? t.unflatten(0, {inputs.batch, t.size(0) / inputs.batch}) : t;
    return unfolded.unflatten(-1, sizes);
  };
  const std::int64_t size = options_.head_dim;
  if (fused_ == nullptr) {
    const auto own = [&](const at::Tensor& t) { return heads(t, {t.size(-1) / size, size}); };
    std::vector<at::Tensor> qkv = linear_products(x, {*query_, *key_, *value_});
    if (options_.qk_norm_over_heads) {
      qkv[0] = normed_over_heads(qkv[0], q_norm_);
      qkv[1] = normed_over_heads(qkv[1], k_norm_);
    }
    return turned({own(qkv[0]), own(qkv[1]), own(qkv[2])}, inputs);
  }
  const at::Tensor product = (*fused_)(x);
  const std::int64_t queries = options_.heads / options_.kv_heads;
  const std::int64_t groups = product.size(-1) / (size * (queries + 2));
  const at::Tensor qkv = heads(product, {groups, queries + 2, size});
  const std::vector<at::Tensor> parts = qkv.split_with_sizes({queries, 1, 1}, 3);
  return turned({parts[0].flatten(2, 3), parts[1].flatten(2, 3), parts[2].flatten(2, 3)}, inputs);
}

Attention::Heads Attention::turned(const Heads& heads, const AttentionInputs& inputs) {
  const bool by_head = !options_.qk_norm_over_heads;
  const at::Tensor q = by_head ? normed(heads.q, q_norm_) : heads.q;
  const at::Tensor k = by_head ? normed(heads.k, k_norm_) : heads.k;
  if (!inputs.cos.defined()) {
    return {q, k, heads.v};
  }
  const auto [turned_q, turned_k] =
      rotary_embedding(along_tables(q, inputs), along_tables(k, inputs), inputs.cos, inputs.sin);
  return {as_batch(turned_q, q), as_batch(turned_k, k), heads.v};
}

at::Tensor Attention::forward(const at::Tensor& x, const AttentionInputs& inputs) {
  check_called();
  const bool folded = x.dim() == 2;
  TESSERA_CHECK(!folded || inputs.batch > 0, "an Attention got an input of sizes ", x.sizes(),
                " (batch * tokens, hidden) without the batch; set AttentionInputs::batch");
  const Heads heads = project(x, inputs);
  const at::Tensor mixed =
      attend(heads.q.transpose(1, 2), heads.k.transpose(1, 2), heads.v.transpose(1, 2), inputs)
          .transpose(1, 2);
  const at::Tensor joined = mixed.flatten(2);
  return (*output_)(folded ? joined.flatten(0, 1) : joined);
}

at::Tensor Attention::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttentionInputs& inputs) {
  TESSERA_CHECK(inputs.documents == nullptr || (options_.causal && !inputs.mask.defined()),
                "an Attention was given documents ",
                options_.causal ? "and a mask" : "but is not causal",
                "; pass one mask that also separates the documents");
  if (inputs.context_parallel) {
    TESSERA_CHECK(!is_training() || options_.dropout == 0, "an Attention with a dropout of ",
                  options_.dropout,
                  " was called in training on a split sequence; attention dropout does not support "
                  "context parallelism: set dropout to 0");
    return inputs.context_parallel->attention(q, k, v,
                                              {.causal = options_.causal,
                                               .window = options_.window,
                                               .mask = inputs.mask,
                                               .documents = inputs.documents});
  }
  const double dropout = is_training() ? options_.dropout : 0;
  if (options_.causal && !inputs.mask.defined()) {
    return detail::causal_attention(
        q, k, v, {.window = options_.window, .documents = inputs.documents, .dropout = dropout});
  }
  return attention(q, k, v, /*causal=*/false, inputs.mask, dropout);
}

void Attention::reset_parameters(const InitContext& init) {
  fill_linears(init, {query_.get(), key_.get(), value_.get(), fused_.get()}, *output_,
               options_.init_std, options_.output_init_std);
}

namespace {

const MlpOptions& checked_mlp(const MlpOptions& options) {
  TESSERA_CHECK(options.hidden > 0 && options.inner > 0, "an MLP of ", options.hidden,
                " features and ", options.inner,
                " inner features is invalid; both must be 1 or more");
  return options;
}

}  // namespace

SwiGlu::SwiGlu(const MlpOptions& options) : options_(checked_mlp(options)) {
  const LinearOptions bias{.bias = options.bias};
  const auto linear = [&](const std::string& name, std::int64_t in, std::int64_t out) {
    return register_module(name, std::make_shared<Linear>(in, out, bias));
  };
  const MlpNames& names = options.names;
  gate_ = linear(names.gate, options.hidden, options.inner);
  up_ = linear(names.up, options.hidden, options.inner);
  down_ = linear(names.down, options.inner, options.hidden);
}

at::Tensor SwiGlu::forward(const at::Tensor& x) {
  check_called();
  const std::vector<at::Tensor> gate_up = linear_products(x, {*gate_, *up_});
  return (*down_)(silu_mul(gate_up[0], gate_up[1]));
}

void SwiGlu::reset_parameters(const InitContext& init) {
  fill_linears(init, {gate_.get(), up_.get()}, *down_, options_.init_std, options_.output_init_std);
}

GeluMlp::GeluMlp(const MlpOptions& options, bool tanh)
    : options_(checked_mlp(options)), tanh_(tanh) {
  const LinearOptions bias{.bias = options.bias};
  up_ = register_module(options.names.up,
                        std::make_shared<Linear>(options.hidden, options.inner, bias));
  down_ = register_module(options.names.down,
                          std::make_shared<Linear>(options.inner, options.hidden, bias));
}

at::Tensor GeluMlp::forward(const at::Tensor& x) {
  check_called();
  return (*down_)(at::gelu((*up_)(x), tanh_ ? "tanh" : "none"));
}

void GeluMlp::reset_parameters(const InitContext& init) {
  fill_linears(init, {up_.get()}, *down_, options_.init_std, options_.output_init_std);
}

}  // namespace tessera::nn
