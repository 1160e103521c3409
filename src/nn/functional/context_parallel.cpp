// The positions of a rank, and attention of its two chunks to the gathered keys.

#include "tessera/nn/context_parallel.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>
#include <vector>

#include "functional/local_heads.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/attention_kernel.h"

namespace tessera::nn {
namespace {

// All-gather of a sequence that is split into head and tail chunks. One autograd function rather
// than a redistribution with views around it: keys and values are one collective, and the chunks
// are ordered while they are copied out of its buffer.

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// A custom class, so that autograd's context keeps it.
struct Sequence : torch::CustomClassHolder {
  Sequence(std::int64_t d, DeviceMesh m, const char* p) : dim(d), mesh(std::move(m)), purpose(p) {}
  std::int64_t dim;
  DeviceMesh mesh;
  const char* purpose;
};
using SequencePtr = c10::intrusive_ptr<Sequence>;

/// A complex number is two to a collective.
at::Tensor sent(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

/// The collective of `start(group)`, to its end, where there is something to exchange. A meta
/// tensor has shapes alone: its collective is called only to be counted.
template <class Start>
void exchange(const at::Tensor& own, const Sequence& sequence, const Start& start) {
  comm::Communicator& group = sequence.mesh.group();
  if (own.numel() == 0 || (own.is_meta() && !group.takes_meta_tensors())) {
    return;
  }
  flush_pending_transfers(group);
  const comm::PurposeScope purpose(group, sequence.purpose);
  start(group)->wait();
}

/// (ranks, ...) of every rank's `own`.
at::Tensor all_gathered(const at::Tensor& own, const Sequence& sequence) {
  if (sequence.mesh.size() == 1) {
    return own.unsqueeze(0);
  }
  std::vector<std::int64_t> sizes{sequence.mesh.size()};
  sizes.insert(sizes.end(), own.sizes().begin(), own.sizes().end());
  at::Tensor of_ranks = at::empty(sizes, own.options());
  exchange(own, sequence,
           [&](comm::Communicator& group) { return group.all_gather(sent(of_ranks), sent(own)); });
  return of_ranks;
}

/// This rank's part of `of_ranks`, (ranks, ...), summed over all ranks.
at::Tensor reduce_scattered(const at::Tensor& of_ranks, const Sequence& sequence) {
  if (sequence.mesh.size() == 1) {
    return of_ranks.select(0, 0);
  }
  at::Tensor own = at::empty(of_ranks.sizes().slice(1), of_ranks.options());
  exchange(own, sequence, [&](comm::Communicator& group) {
    return group.reduce_scatter(sent(own), sent(of_ranks), ReduceOp::kSum);
  });
  return own;
}

/// (ranks, ...), each with its head and its tail along `dim` -> the whole without the first
/// dimension.
at::Tensor in_order(const at::Tensor& of_ranks, std::int64_t dim) {
  const std::int64_t ranks = of_ranks.size(0);
  std::vector<at::Tensor> chunks(static_cast<std::size_t>(2 * ranks));
  for (std::int64_t r = 0; r < ranks; ++r) {
    const std::vector<at::Tensor> halves = of_ranks.select(0, r).chunk(2, dim);
    chunks[static_cast<std::size_t>(r)] = halves[0];
    chunks[static_cast<std::size_t>(2 * ranks - 1 - r)] = halves[1];
  }
  return at::cat(chunks, dim);
}

/// The inverse of in_order(): copies the chunks of `whole` to where their ranks have them.
void copy_by_rank(const at::Tensor& of_ranks, const at::Tensor& whole, std::int64_t dim) {
  const std::int64_t ranks = of_ranks.size(0);
  const std::int64_t length = whole.size(dim) / (2 * ranks);
  for (std::int64_t r = 0; r < ranks; ++r) {
    const at::Tensor part = of_ranks.select(0, r);
    part.narrow(dim, 0, length).copy_(whole.narrow(dim, r * length, length));
    part.narrow(dim, length, length).copy_(whole.narrow(dim, (2 * ranks - 1 - r) * length, length));
  }
}

struct GatherSequenceFunction : torch::autograd::Function<GatherSequenceFunction> {
  static variable_list forward(AutogradContext* context, at::TensorList parts,
                               const SequencePtr& sequence) {
    context->saved_data["sequence"] = c10::IValue::make_capsule(sequence);
    const at::Tensor of_ranks = all_gathered(at::stack(parts).contiguous(), *sequence);
    variable_list wholes;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      wholes.push_back(in_order(of_ranks.select(1, static_cast<std::int64_t>(i)), sequence->dim));
    }
    return wholes;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    TESSERA_CHECK(
        !c10::GradMode::is_enabled(),
        "attention over a sequence that is split is differentiable once; a gradient of its "
        "gradient was asked for (create_graph): write it with at:: operators there");
    const auto saved = context->saved_data.at("sequence").toCapsule();
    const auto& sequence = static_cast<const Sequence&>(*saved);  // kept alive by the context
    const auto count = std::ssize(grads);
    std::vector<std::int64_t> sizes{sequence.mesh.size(), count};
    sizes.insert(sizes.end(), grads[0].sizes().begin(), grads[0].sizes().end());
    sizes[static_cast<std::size_t>(sequence.dim + 2)] /= sequence.mesh.size();
    const at::Tensor terms = at::empty(sizes, grads[0].options());
    for (std::int64_t i = 0; i < count; ++i) {
      copy_by_rank(terms.select(1, i), grads[static_cast<std::size_t>(i)], sequence.dim);
    }
    const at::Tensor own = reduce_scattered(terms, sequence);
    variable_list of_arguments;
    for (std::int64_t i = 0; i < count; ++i) {
      of_arguments.push_back(own.select(0, i));
    }
    of_arguments.emplace_back();  // the sequence's
    return of_arguments;
  }
};

/// Each of `parts`, of equal sizes and one type, is this rank's head and tail chunk along `dim`:
/// returns the whole of each, in the order of the sequence. Collective over the 1-D `mesh`, one
/// all-gather for all. Gradient: the sum over the ranks, one reduce-scatter; differentiable once.
/// `purpose`: what both are for, a literal, for traces and for messages.
std::vector<at::Tensor> gather_sequence(const std::vector<at::Tensor>& parts, std::int64_t dim,
                                        const DeviceMesh& mesh, const char* purpose) {
  return GatherSequenceFunction::apply(at::TensorList(parts),
                                       c10::make_intrusive<Sequence>(dim, mesh, purpose));
}

/// Dimension of the tokens in (batch, heads, tokens, width).
constexpr std::int64_t kTokensDim = 2;

std::int64_t counted_dim(const at::Tensor& tensor, std::int64_t dim) {
  TESSERA_CHECK(dim >= -tensor.dim() && dim < tensor.dim(), "dimension ", dim,
                " was said to be the sequence of a tensor of sizes ", tensor.sizes(),
                "; give one that it has");
  return dim < 0 ? dim + tensor.dim() : dim;
}

void check_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const ContextAttentionOptions& options) {
  check_attention("context-parallel attention", q, k, v, options.window);
  TESSERA_CHECK(k.sizes() == v.sizes() && k.scalar_type() == v.scalar_type(),
                "context-parallel attention was given keys of sizes ", k.sizes(), " in ",
                k.scalar_type(), " and values of ", v.sizes(), " in ", v.scalar_type(),
                "; they travel together: make them equal");
  TESSERA_CHECK(q.size(kTokensDim) % 2 == 0, "context-parallel attention was given ",
                q.size(kTokensDim),
                " tokens of a rank, which are no two chunks; take them from shard()");
  TESSERA_CHECK(options.causal || options.window == 0 || options.mask.defined(),
                "context-parallel attention with a window of ", options.window,
                " that is not causal was asked for; pass a mask in its place");
  TESSERA_CHECK(options.documents == nullptr || (options.causal && !options.mask.defined()),
                "context-parallel attention was given documents ",
                options.causal ? "and a mask" : "that is not causal",
                "; pass one mask that says both");
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
    return attend_to_local_heads(
        "context-parallel attention", /*by_batch=*/options.documents == nullptr, q, k, v,
        [&](const at::Tensor& local_q, const at::Tensor& local_k, const at::Tensor& local_v) {
          return attention(local_q, local_k, local_v, options);
        });
  }
  check_inputs(q, k, v, options);
  if (options.documents != nullptr) {
    options.documents->check_sequences(q.size(0), q.size(kTokensDim) * mesh_.size());
  }
  const std::vector<at::Tensor> whole =
      gather_sequence({k, v}, kTokensDim, mesh_, "keys and values");
  if (options.mask.defined() || !options.causal) {
    return nn::attention(q, whole[0], whole[1], /*causal=*/false, options.mask);
  }
  const auto own = chunks(whole[0].size(kTokensDim));
  std::vector<std::int64_t> firsts{own[0].first};
  if (own[0].first + own[0].length < own[1].first) {  // the last rank's two are one
    firsts.push_back(own[1].first);
  }
  return tessera::detail::chunked_attention(
      q, whole[0], whole[1], firsts, options.window,
      options.documents == nullptr ? c10::IntArrayRef() : options.documents->offsets());
}

}  // namespace tessera::nn
