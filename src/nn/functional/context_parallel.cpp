// The positions of a rank, and attention of its two chunks. Each chunk is computed with the keys up
// to its end: later keys are never seen, and cost nothing.

#include "tessera/nn/context_parallel.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "functional/gather_sequence.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/local_map.h"
#include "tessera/nn/attention_kernel.h"

namespace tessera::nn {
namespace {

/// Dimension of the tokens in (batch, heads, tokens, width).
constexpr std::int64_t kTokensDim = 2;

std::int64_t counted_dim(const at::Tensor& tensor, std::int64_t dim) {
  TESSERA_CHECK(dim >= -tensor.dim() && dim < tensor.dim(), "dimension ", dim,
                " was said to be the sequence of a tensor of sizes ", tensor.sizes(),
                "; give one that it has");
  return dim < 0 ? dim + tensor.dim() : dim;
}

void check_queries(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  for (const at::Tensor* tensor : {&q, &k, &v}) {
    TESSERA_CHECK(tensor->dim() == 4 && tensor->size(kTokensDim) == q.size(kTokensDim),
                  "context-parallel attention was given queries of sizes ", q.sizes(),
                  " and keys or values of ", tensor->sizes(),
                  "; pass (batch, heads, tokens, width), of the same tokens");
  }
  TESSERA_CHECK(k.sizes() == v.sizes() && k.scalar_type() == v.scalar_type(),
                "context-parallel attention was given keys of sizes ", k.sizes(), " in ",
                k.scalar_type(), " and values of ", v.sizes(), " in ", v.scalar_type(),
                "; they travel together: make them equal");
  TESSERA_CHECK(q.size(kTokensDim) % 2 == 0, "context-parallel attention was given ",
                q.size(kTokensDim),
                " tokens of a rank, which are no two chunks; take them from shard()");
}

/// Checks that only tensor parallelism splits the tensor: each rank has whole heads of its tokens.
void check_heads_alone(const at::Tensor& tensor) {
  const bool distributed = tessera::is_distributed(tensor);
  const Layout* layout = distributed ? sharding_spec(tensor).layout.get() : nullptr;
  TESSERA_CHECK(distributed && !layout->is_partial() && layout->mesh_dims_of(2).empty() &&
                    layout->mesh_dims_of(3).empty(),
                "context-parallel attention was given queries, keys or values of sizes ",
                tensor.sizes(), ", ", distributed ? to_string(*layout) : std::string("plain"),
                "; all three may be split by batch and heads alone, all alike");
}

}  // namespace

ContextParallel::ContextParallel(DeviceMesh mesh) : mesh_(std::move(mesh)) {
  TESSERA_CHECK(mesh_ && mesh_.ndim() == 1, "context parallelism on ", to_string(mesh_),
                " was asked for; pass one dimension, for example mesh[\"cp\"]");
}

std::array<ContextParallel::Chunk, 2> ContextParallel::chunks(std::int64_t sequence) const {
  const std::int64_t all = 2 * mesh_.size(), rank = mesh_.local_rank();
  TESSERA_CHECK(sequence % all == 0, "a sequence of ", sequence, " tokens was to be split over ",
                mesh_.size(), " context-parallel ranks, which takes a multiple of ", all,
                "; pad or cut it");
  const std::int64_t length = sequence / all;
  return {{{rank * length, length}, {(all - 1 - rank) * length, length}}};
}

at::Tensor ContextParallel::positions(std::int64_t sequence, c10::Device device) const {
  std::vector<at::Tensor> parts;
  for (const Chunk& chunk : chunks(sequence)) {
    parts.push_back(
        at::arange(chunk.first, chunk.first + chunk.length, at::dtype(c10::kLong).device(device)));
  }
  return at::cat(parts);
}

at::Tensor ContextParallel::shard(const at::Tensor& whole, std::int64_t dim) const {
  const std::int64_t along = counted_dim(whole, dim);
  std::vector<at::Tensor> parts;
  for (const Chunk& chunk : chunks(whole.size(along))) {
    parts.push_back(whole.narrow(along, chunk.first, chunk.length));
  }
  return at::cat(parts, along);
}

at::Tensor ContextParallel::unshard(const at::Tensor& part, std::int64_t dim) const {
  const std::int64_t along = counted_dim(part, dim);
  chunks(part.size(along) * mesh_.size());
  return gather_sequence({part}, along, mesh_, "sequence").front();
}

at::Tensor ContextParallel::attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const ContextAttentionOptions& options) {
  if (tessera::is_distributed(q)) {
    return attention_of_heads(q, k, v, options);
  }
  check_queries(q, k, v);
  TESSERA_CHECK(options.causal || options.window == 0 || options.mask.defined(),
                "context-parallel attention with a window of ", options.window,
                " that is not causal was asked for; pass a mask in its place");
  const std::vector<at::Tensor> whole =
      gather_sequence({k, v}, kTokensDim, mesh_, "keys and values");
  if (options.mask.defined() || !options.causal) {
    return nn::attention(q, whole[0], whole[1], /*causal=*/false, options.mask);
  }
  const auto own = chunks(whole[0].size(kTokensDim));
  const std::int64_t length = own[0].length;
  std::vector<at::Tensor> mixed;
  for (std::int64_t i = 0; i < 2; ++i) {
    mixed.push_back(attend(q.narrow(kTokensDim, i * length, length), whole[0], whole[1],
                           own[static_cast<std::size_t>(i)], options.window));
  }
  return at::cat(mixed, kTokensDim);
}

/// On each rank's heads.
at::Tensor ContextParallel::attention_of_heads(const at::Tensor& q, const at::Tensor& k,
                                               const at::Tensor& v,
                                               const ContextAttentionOptions& options) {
  for (const at::Tensor* tensor : {&q, &k, &v}) {
    check_heads_alone(*tensor);
  }
  const DistributedTensor query(q);
  std::vector<std::int64_t> sizes = q.sizes().vec();
  sizes.back() = v.size(-1);
  const auto of_locals = [&](const std::vector<at::Tensor>& locals) {
    return std::vector{attention(locals[0], locals[1], locals[2], options)};
  };
  return local_map(of_locals, {q, k, v}, query.mesh(), {query.placements()},
                   {.out_sizes = {std::move(sizes)}})
      .front();
}

at::Tensor ContextParallel::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   Chunk queries, std::int64_t window) {
  // From the first key that the first query sees to the last query's own.
  const std::int64_t first = window > 0 ? std::max<std::int64_t>(0, queries.first - window + 1) : 0;
  const Chunk keys{first, queries.first + queries.length - first};
  const auto seen = [&](const at::Tensor& t) {
    return t.narrow(kTokensDim, keys.first, keys.length);
  };
  if (queries.first == 0 && (window == 0 || window >= queries.length)) {
    return nn::attention(q, seen(k), seen(v), /*causal=*/true);
  }
  return nn::attention(q, seen(k), seen(v), /*causal=*/false, mask(queries, keys, window, q));
}

/// A mask of numbers that are added to the scores: libtorch would convert a boolean mask in each
/// call, and each layer would keep its own copy for backward.
const at::Tensor& ContextParallel::mask(Chunk queries, Chunk keys, std::int64_t window,
                                        const at::Tensor& q) {
  if (std::exchange(length_of_masks_, queries.length) != queries.length) {
    masks_.clear();
  }
  at::Tensor& known = masks_[{queries.first, keys.first, queries.length, window, q.scalar_type()}];
  if (!known.defined() || known.device() != q.device()) {
    // A call in inference mode makes it for training, too.
    const c10::InferenceMode ordinary(false);
    const std::int64_t own = queries.first - keys.first;  // the first query's own key
    constexpr double kHidden = -std::numeric_limits<double>::infinity();
    const std::vector<std::int64_t> sizes{queries.length, keys.length};
    known = at::full(sizes, kHidden, q.options()).triu_(own + 1);
    if (window > 0) {
      known.add_(at::full(sizes, kHidden, q.options()).tril_(own - window));
    }
  }
  return known;
}

}  // namespace tessera::nn
