// The functions of tessera::nn: the library's own operators, attention, attention with documents
// and windows, and context-parallel attention.

#include "tessera/nn/functional.h"
#include "tessera/comm/detail/scopes.h"
#include "tessera/kernels/detail/fake_state.h"
#include "tessera/nn/detail/records.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <numeric>
#include <optional>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/local_map.h"
#include "tessera/kernels/fake_mode.h"
#include "tessera/nn/checkpoint.h"

namespace tessera::nn {
namespace {

/// Returns a key that differs from the keys of this thread's earlier dropout calls.
RandomKey next_id() {
  thread_local std::uint64_t calls = 0;
  return {stream_of("nn::dropout"), replayed_count(calls)};
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return tessera::detail::rms_norm(x, weight, eps);
}

std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                               const at::Tensor& weight, double eps) {
  return tessera::detail::add_rms_norm(x, residual, weight, eps);
}

at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up) {
  return tessera::detail::silu_mul(gate, up);
}

at::Tensor rotary_embedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  return tessera::detail::rotary_embedding(x, cos, sin);
}

std::pair<at::Tensor, at::Tensor> rotary_embedding(const at::Tensor& q, const at::Tensor& k,
                                                   const at::Tensor& cos, const at::Tensor& sin) {
  return tessera::detail::rotary_embedding(q, k, cos, sin);
}

at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices) {
  return tessera::detail::embedding(weight, indices);
}

at::Tensor dropout(const at::Tensor& x, double p, RandomKey key) {
  const auto place = tessera::detail::random_place({"dropout", x, x, next_id()});
  return tessera::detail::dropout(x, p, key, place.elements.first_element);
}

namespace {

struct BatchRanks {
  std::int64_t ranks = 1;
  bool weighs = false;
};

thread_local BatchRanks of_thread;

}  // namespace

std::int64_t batch_ranks() {
  return of_thread.ranks;
}

void set_batch_ranks(std::int64_t ranks) {
  of_thread.ranks = ranks;
}

bool weighs_ranks() {
  return of_thread.weighs;
}

void note_weighing() {
  of_thread.weighs = true;
}

namespace {

constexpr std::int64_t kTokensDim = 2;

using Attend =
    std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)>;

/// Throws Error unless q, k and v are (batch, heads, tokens, width) with fitting sizes, and the
/// window is not negative. The message begins with `call`.
void check_attention(const char* call, const at::Tensor& q, const at::Tensor& k,
                     const at::Tensor& v, std::int64_t window) {
  const bool fits = q.dim() == 4 && k.dim() == 4 && v.dim() == 4 &&
                    k.sizes().slice(0, 3) == v.sizes().slice(0, 3) && q.size(0) == k.size(0) &&
                    q.size(2) == k.size(2) && q.size(3) == k.size(3) &&
                    (q.size(1) == k.size(1) || (k.size(1) > 0 && q.size(1) % k.size(1) == 0));
  TESSERA_CHECK(fits, call, " was given queries of sizes ", q.sizes(), ", keys of ", k.sizes(),
                " and values of ", v.sizes(),
                "; pass (batch, heads, tokens, width) with equal batch and tokens, and a number of "
                "query heads that is a multiple of the key and value heads");
  TESSERA_CHECK(window >= 0, call, " was given a window of ", window,
                "; pass a number of positions, or 0 for all");
}

/// Calls `attend` on the local tensors. The result has q's layout. Throws Error unless q, k and v
/// are sharded only by heads (if `by_batch`, also by batch). The message begins with `call`.
at::Tensor attend_to_local_heads(const char* call, bool by_batch, const at::Tensor& q,
                                 const at::Tensor& k, const at::Tensor& v, const Attend& attend) {
  for (const at::Tensor* tensor : {&q, &k, &v}) {
    const bool distributed = tessera::is_distributed(*tensor);
    const Layout* layout = distributed ? sharding_spec(*tensor).layout.get() : nullptr;
    TESSERA_CHECK(distributed && !layout->is_partial() &&
                      (by_batch || layout->mesh_dims_of(0).empty()) &&
                      layout->mesh_dims_of(2).empty() && layout->mesh_dims_of(3).empty(),
                  call, " was given queries, keys or values of sizes ", tensor->sizes(), ", ",
                  distributed ? to_string(*layout) : std::string("plain"),
                  "; all three must be distributed with the same layout, split over ",
                  by_batch ? "batch and heads" : "heads", " only");
  }
  const DistributedTensor query(q);
  std::vector<std::int64_t> sizes = q.sizes().vec();
  sizes.back() = v.size(-1);
  const auto of_locals = [&](const std::vector<at::Tensor>& locals) {
    return std::vector{attend(locals[0], locals[1], locals[2])};
  };
  return local_map(of_locals, {q, k, v}, query.mesh(), {query.placements()},
                   {.out_sizes = {std::move(sizes)}})
      .front();
}

const char* name_of(at::SDPBackend backend) {
  switch (backend) {
    case at::SDPBackend::flash_attention:
      return "flash";
    case at::SDPBackend::efficient_attention:
      return "efficient";
    case at::SDPBackend::cudnn_attention:
      return "cudnn";
    case at::SDPBackend::overrideable:
      return "of the device's library";
    default:
      return "math";
  }
}

}  // namespace

std::string detail::to_string(const tessera::detail::AttentionKernel& kernel) {
  return std::string(name_of(kernel.backend)) +
         (kernel.repeats_heads ? ", key-value heads repeated" : "");
}

std::string attention_kernel(const at::TensorOptions& options, std::int64_t heads,
                             std::int64_t kv_heads, std::int64_t tokens, std::int64_t width,
                             bool masked, bool packed) {
  const at::Tensor one = at::empty({1, 1, 1, width}, options).requires_grad_();
  const at::Tensor q = one.expand({1, heads, tokens, width});
  const at::Tensor kv = one.expand({1, kv_heads, tokens, width});
  // Attention kernels need an attention mask with contiguous rows.
  const at::Tensor mask =
      masked ? at::empty({tokens}, options.dtype(c10::kBool)).expand({tokens, tokens})
             : at::Tensor();
  const tessera::detail::AttentionKernel kernel = tessera::detail::choose_attention(
      q, kv, kv, tessera::detail::backend_of_libtorch(/*causal=*/!masked, mask));
  return detail::to_string(packed ? detail::packed_kernel(kernel) : kernel);
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                     const at::Tensor& mask, double dropout) {
  return tessera::detail::attention(q, k, v, causal, mask, dropout);
}

at::Tensor detail::causal_mask(std::int64_t tokens, std::int64_t window, c10::Device device) {
  const at::Tensor causal = at::ones({tokens, tokens}, at::dtype(c10::kBool).device(device)).tril();
  return window > 0 ? causal.triu(1 - window) : causal;
}

namespace {

at::Tensor copied_to(const std::vector<std::int64_t>& numbers, c10::Device device) {
  const at::Tensor host =
      at::empty({std::ssize(numbers)}, at::dtype(at::kInt).pinned_memory(device.is_cuda()));
  std::ranges::transform(numbers, host.mutable_data_ptr<std::int32_t>(),
                         [](std::int64_t number) { return static_cast<std::int32_t>(number); });
  return host.to(host.options().device(device).pinned_memory(false), /*non_blocking=*/true);
}

}  // namespace

detail::DocumentOffsets::DocumentOffsets(const at::Tensor& positions, c10::Device device) {
  TESSERA_CHECK(positions.dim() == 2 && positions.scalar_type() == at::kLong,
                "documents: the positions have sizes ", positions.sizes(), " and type ",
                positions.scalar_type(), "; pass int64 positions of sizes (batch, tokens)");
  batch_ = positions.size(0);
  tokens_ = positions.size(1);
  const at::Tensor host = positions.cpu().contiguous();
  const auto* position = host.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < host.numel(); ++i) {
    if (i % tokens_ == 0 || position[i] == 0) {
      offsets_.push_back(i);
    }
  }
  offsets_.push_back(host.numel());
  for (const std::int64_t length : lengths()) {
    longest_ = std::max(longest_, length);
  }
  // The offsets are made outside of inference mode, because training can use the offsets later.
  const c10::InferenceMode ordinary(false);
  device_offsets_ = copied_to(offsets_, device);
}

std::vector<std::int64_t> detail::DocumentOffsets::lengths() const {
  std::vector<std::int64_t> lengths(offsets_.size());
  std::adjacent_difference(offsets_.begin(), offsets_.end(), lengths.begin());
  return {lengths.begin() + 1, lengths.end()};
}

void detail::DocumentOffsets::check_sequences(std::int64_t batch, std::int64_t tokens) const {
  TESSERA_CHECK(batch == batch_ && tokens == tokens_, "attention: the input has ", batch,
                " sequences of ", tokens, " tokens, but the documents were made for ", batch_,
                " sequences of ", tokens_, "; make the documents from the input's positions");
}

at::Tensor detail::DocumentOffsets::mask(std::int64_t window) const {
  const c10::Device device = device_offsets_.device();
  std::vector<std::int64_t> of_tokens;
  std::int64_t document = 0;
  for (const std::int64_t length : lengths()) {
    of_tokens.insert(of_tokens.end(), static_cast<std::size_t>(length), document++);
  }
  const at::Tensor ids =
      at::tensor(of_tokens, at::dtype(at::kLong)).view({batch_, tokens_}).to(device);
  return ids.unsqueeze(2)
      .eq(ids.unsqueeze(1))
      .logical_and_(detail::causal_mask(tokens_, window, device))
      .unsqueeze(1);
}

// Causal attention with packed documents and windows, without a mask tensor: by a kernel with
// document offsets, a kernel with a window option, or several kernel calls on visible keys.

namespace {

/// Joins the sequences of the batch: (batch, heads, tokens, ...) -> (batch * tokens, heads, ...).
at::Tensor packed(const at::Tensor& by_heads) {
  return by_heads.transpose(1, kTokensDim).flatten(0, 1);
}

at::Tensor unpacked(const at::Tensor& rows, const at::Tensor& like) {
  return rows.unflatten(0, {like.size(0), like.size(kTokensDim)}).transpose(1, kTokensDim);
}

/// Pads the head width with zeros to a multiple of 8, for the flash kernel. Scores do not change.
at::Tensor padded(const at::Tensor& heads) {
  const std::int64_t missing = (8 - heads.size(-1) % 8) % 8;
  return missing == 0 ? heads : at::constant_pad_nd(heads, {0, missing});
}

at::Tensor by_flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const Documents* documents, std::int64_t window) {
  const auto given = [&](const at::Tensor& heads) {
    return padded(documents != nullptr ? packed(heads) : heads.transpose(1, kTokensDim));
  };
  const auto offsets =
      documents != nullptr ? std::optional(documents->device_offsets()) : std::nullopt;
  const std::int64_t longest = documents != nullptr ? documents->longest() : q.size(kTokensDim);
  // The flash kernel's window does not count the query's own position; -1 means no window.
  const std::int64_t left = window > 0 ? window - 1 : -1;
  const std::int64_t right = window > 0 ? 0 : -1;
  const at::Tensor mixed = std::get<0>(at::_flash_attention_forward(
      given(q), given(k), given(v), offsets, offsets, longest, longest, /*dropout_p=*/0,
      /*is_causal=*/true, /*return_debug_mask=*/false,
      1 / std::sqrt(static_cast<double>(q.size(-1))), left, right));
  const at::Tensor own = mixed.slice(-1, 0, v.size(-1));
  return documents != nullptr ? unpacked(own, q) : own.transpose(1, kTokensDim);
}

/// Computes attention with the memory-efficient kernel, which needs as many key and value heads as
/// query heads.
at::Tensor by_efficient(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const Documents& documents) {
  constexpr std::int64_t kCausal = 1;  // libtorch's sdp::CustomMaskType::CausalFromTopLeft
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

struct Block {
  std::int64_t first, count;
  /// Whether every query of the block sees all earlier keys, so that the causal flag is sufficient.
  bool is_causal(std::int64_t window) const { return first == 0 && count <= window; }
};

/// Divides queries into blocks for attention with a window. The first block is only causal, unless
/// the window is small. Other blocks have up to 512 queries and need a mask.
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
  const std::vector<Block> blocks = blocks_of(q.size(kTokensDim), window);
  std::vector<std::int64_t> counts;
  std::ranges::transform(blocks, std::back_inserter(counts), &Block::count);
  std::int64_t masked = 0;  // number of queries in the largest block that needs a mask
  for (const Block& block : blocks) {
    masked = std::max(masked, block.is_causal(window) ? 0 : block.count);
  }
  // The mask covers the `window` - 1 keys before a block of queries, and the block's own keys.
  const at::Tensor mask = tessera::detail::window_term(
      {.queries = masked, .keys = masked + window - 1, .own = window - 1, .length = window}, q);
  const std::vector<at::Tensor> queries = q.split_with_sizes(counts, kTokensDim);
  std::vector<at::Tensor> mixed;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const auto [first, count] = blocks[i];
    const std::int64_t begin = std::max<std::int64_t>(0, first - window + 1);
    const std::int64_t keys = first + count - begin;
    const bool causal = blocks[i].is_causal(window);
    const at::Tensor seen =
        causal ? at::Tensor()
               : mask.narrow(0, 0, count).narrow(1, begin - (first - window + 1), keys);
    mixed.push_back(attention(queries[i], k.narrow(kTokensDim, begin, keys),
                              v.narrow(kTokensDim, begin, keys), causal, seen));
  }
  return at::cat(mixed, kTokensDim);
}

at::Tensor in_window(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     std::int64_t window) {
  return window > 0 && window < q.size(kTokensDim) ? by_blocks(q, k, v, window)
                                                   : attention(q, k, v, /*causal=*/true);
}

/// Computes attention for each document separately. q, k and v are split for all documents in one
/// operation, so that backward also joins the documents' gradients in one operation.
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
                   const detail::CausalAttentionOptions& options) {
  const at::Tensor mask = options.documents != nullptr
                              ? options.documents->mask(options.window)
                              : detail::causal_mask(q.size(kTokensDim), options.window, q.device());
  return attention(q, k, v, /*causal=*/false, mask, options.dropout);
}

at::Tensor on_gpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const detail::CausalAttentionOptions& options) {
  const Documents* documents = options.documents.get();
  switch (detail::packed_kernel(tessera::detail::choose_attention(
                                    q, k, v, tessera::detail::backend_of_libtorch(/*causal=*/true)))
              .backend) {
    case at::SDPBackend::flash_attention:
      return by_flash(q, k, v, documents, options.window);
    case at::SDPBackend::efficient_attention:
      // The memory-efficient kernel is used only without a window, because its window gives wrong
      // gradients before libtorch 2.15.
      if (options.window == 0) {
        return by_efficient(q, k, v, *documents);
      }
      return documents == nullptr ? by_blocks(q, k, v, options.window) : by_mask(q, k, v, options);
    default:
      return by_mask(q, k, v, options);
  }
}

/// Removes from `options` what has no effect: a window that covers all keys, and documents that are
/// whole sequences.
detail::CausalAttentionOptions needed(detail::CausalAttentionOptions options, std::int64_t tokens) {
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

at::Tensor detail::causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const CausalAttentionOptions& options) {
  check_attention("causal attention", q, k, v, options.window);
  if (options.documents != nullptr) {
    options.documents->check_sequences(q.size(0), q.size(kTokensDim));
  }
  const CausalAttentionOptions own = needed(options, q.size(kTokensDim));
  const bool plain = own.documents == nullptr && own.window == 0;
  // A memory plan of a GPU step runs on fake CPU tensors. CPU kernels have no windows, so a memory
  // plan uses attention without windows and documents.
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

tessera::detail::AttentionKernel detail::packed_kernel(tessera::detail::AttentionKernel kernel) {
  if (kernel.backend == at::SDPBackend::cudnn_attention) {
    kernel.backend = at::SDPBackend::flash_attention;
  }
  return kernel;
}

// Context parallelism: token positions of a rank, and attention of a rank's two chunks to the
// gathered keys.
//
// An autograd function gathers keys and values in one collective, and orders chunks in the same
// copy. A redistribution with views would need more collectives and copies.

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The arguments of gather_sequence(), for backward. Autograd can save only subclasses of
/// CustomClassHolder.
struct Sequence : torch::CustomClassHolder {
  Sequence(std::int64_t d, DeviceMesh m, const char* p) : dim(d), mesh(std::move(m)), purpose(p) {}
  std::int64_t dim;
  DeviceMesh mesh;
  const char* purpose;
};
using SequencePtr = c10::intrusive_ptr<Sequence>;

/// Returns the tensor that is passed to a collective: collectives take only real types, so a
/// complex tensor is viewed as real numbers.
at::Tensor sent(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

/// Runs the collective start(group) and waits. Skips the collective if `own` is empty, or if `own`
/// is a meta tensor that `group` refuses.
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

/// Puts chunks into the order of the whole sequence. `of_ranks[r]` has the head chunk and the tail
/// chunk of rank r along `dim`.
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

/// The inverse of in_order(): copies rank r's head chunk and tail chunk to of_ranks[r].
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
    TESSERA_CHECK(!c10::GradMode::is_enabled(),
                  "attention over a split sequence is differentiable once only, but create_graph "
                  "was set; for second derivatives, write the attention with at:: operators");
    const auto saved = context->saved_data.at("sequence").toCapsule();
    const auto& sequence = static_cast<const Sequence&>(*saved);
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
    of_arguments.emplace_back();
    return of_arguments;
  }
};

/// Gathers sequences of equal sizes and one type. Each of `parts` has this rank's head chunk and
/// tail chunk along `dim`. Collective over the 1-D `mesh`. Differentiable once. `purpose`: a string
/// literal for traces and messages.
std::vector<at::Tensor> gather_sequence(const std::vector<at::Tensor>& parts, std::int64_t dim,
                                        const DeviceMesh& mesh, const char* purpose) {
  return GatherSequenceFunction::apply(at::TensorList(parts),
                                       c10::make_intrusive<Sequence>(dim, mesh, purpose));
}

std::int64_t counted_dim(const at::Tensor& tensor, std::int64_t dim) {
  TESSERA_CHECK(dim >= -tensor.dim() && dim < tensor.dim(), "dimension ", dim,
                " was passed as the sequence of a tensor of sizes ", tensor.sizes(),
                "; pass a dimension of the tensor");
  return dim < 0 ? dim + tensor.dim() : dim;
}

void check_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const ContextAttentionOptions& options) {
  check_attention("context-parallel attention", q, k, v, options.window);
  TESSERA_CHECK(k.sizes() == v.sizes() && k.scalar_type() == v.scalar_type(),
                "context-parallel attention was given keys of sizes ", k.sizes(), " in ",
                k.scalar_type(), " and values of ", v.sizes(), " in ", v.scalar_type(),
                "; sizes and types of keys and values must be equal");
  TESSERA_CHECK(q.size(kTokensDim) % 2 == 0, "context-parallel attention was given ",
                q.size(kTokensDim),
                " tokens on this rank, which are not two equal chunks; pass the result of shard()");
  TESSERA_CHECK(options.causal || options.window == 0 || options.mask.defined(),
                "context-parallel attention was given a window of ", options.window,
                " without causal, which a window needs; set causal, or pass a mask instead");
  TESSERA_CHECK(options.documents == nullptr || (options.causal && !options.mask.defined()),
                "context-parallel attention was given documents ",
                options.causal ? "and a mask" : "but is not causal",
                "; pass one mask that also separates the documents");
}

}  // namespace

ContextParallel::ContextParallel(DeviceMesh mesh) : mesh_(std::move(mesh)) {
  TESSERA_CHECK(mesh_ && mesh_.ndim() == 1,
                "context parallelism needs a mesh of one dimension, but got ", to_string(mesh_),
                "; pass for example mesh[\"cp\"]");
}

std::array<ContextParallel::Chunk, 2> ContextParallel::chunks(std::int64_t sequence) const {
  const std::int64_t all = 2 * mesh_.size(), rank = mesh_.local_rank();
  TESSERA_CHECK(sequence % all == 0, "a sequence of ", sequence, " tokens can't be split over ",
                mesh_.size(), " context-parallel ranks; the length must be a multiple of ", all,
                ": pad or cut the sequence");
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
  // Only the last rank's two chunks of a sequence are adjacent.
  if (own[0].first + own[0].length < own[1].first) {
    firsts.push_back(own[1].first);
  }
  return tessera::detail::chunked_attention(
      q, whole[0], whole[1], firsts, options.window,
      options.documents == nullptr ? c10::IntArrayRef() : options.documents->offsets());
}

}  // namespace tessera::nn
