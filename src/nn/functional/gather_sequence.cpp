// All-gather of a sequence that is split into head and tail chunks. One autograd function rather
// than a redistribution with views around it: keys and values are one collective, and the chunks
// are ordered while they are copied out of its buffer.

#include "functional/gather_sequence.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/flush_pending_transfers.h"

namespace tessera::nn {
namespace {

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

}  // namespace

std::vector<at::Tensor> gather_sequence(const std::vector<at::Tensor>& parts, std::int64_t dim,
                                        const DeviceMesh& mesh, const char* purpose) {
  return GatherSequenceFunction::apply(at::TensorList(parts),
                                       c10::make_intrusive<Sequence>(dim, mesh, purpose));
}

}  // namespace tessera::nn
