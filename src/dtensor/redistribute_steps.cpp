#include "redistribute_steps.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <numeric>
#include <utility>

#include "local_axis.h"
#include "reducible.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"

namespace tessera::detail {
namespace {

/// The result of a step without a collective.
Started there(const at::Tensor& tensor) {
  return {nullptr, [tensor] { return tensor; }};
}

void check_reducible(const Step& step, const at::Tensor& tensor) {
  TESSERA_CHECK(is_reducible(tensor.scalar_type(), step.op), "internal: a tensor of ",
                tensor.scalar_type(), " cannot be reduced with ", to_string(step.op));
}

/// A flat tensor of `numel` elements that starts with those of the flat `tensor`.
at::Tensor padded(const at::Tensor& tensor, std::int64_t numel) {
  if (tensor.numel() == numel) return tensor;
  auto result = at::zeros({numel}, tensor.options());
  result.narrow(0, 0, tensor.numel()).copy_(tensor);
  return result;
}

/// The axis that a step gathers or splits, as (before, pieces, after).
struct SplitAxis {
  std::int64_t before, extent, after;
  std::vector<Piece> pieces;
  std::int64_t row() const { return before * after; }
  const Piece& mine(const Step& step, const DeviceMesh& mesh) const {
    return pieces[group_rank(mesh, step.mesh_dims)];
  }
  /// Pieces can be communicated where they lie: one after another, without gaps.
  bool in_place() const { return before == 1 && only_tail_is_short(pieces); }
};

SplitAxis split_axis(LayoutPtr split, const Step& step, const DeviceMesh& mesh,
                     c10::IntArrayRef sizes) {
  const auto axis = Axis::split_by(split, step.dim, step.mesh_dims.back());
  const auto around = extents_around({axis}, split, sizes, mesh);
  const auto extent = axis.whole_extent(sizes, mesh, step.mesh_dims);
  return {around[0], extent, around[1], pieces_of(extent, mesh, step.mesh_dims)};
}

/// The gathered pieces, each padded to `stride` elements, as one tensor.
at::Tensor join(const at::Tensor& gathered, std::int64_t stride, const SplitAxis& axis) {
  if (axis.in_place()) return gathered.narrow(0, 0, axis.extent * axis.row());
  std::vector<at::Tensor> parts;
  for (std::size_t r = 0; r < axis.pieces.size(); ++r) {
    const auto size = axis.pieces[r].size;
    parts.push_back(gathered.narrow(0, static_cast<std::int64_t>(r) * stride, size * axis.row())
                        .view({axis.before, size, axis.after}));
  }
  return at::cat(parts, 1).view({-1});
}

/// The pieces of a tensor one after another, each padded to `stride` elements.
at::Tensor separate(const at::Tensor& whole, std::int64_t stride, const SplitAxis& axis) {
  const auto count = static_cast<std::int64_t>(axis.pieces.size());
  if (axis.in_place()) return padded(whole, count * stride);
  const bool even = axis.pieces.back().size * axis.row() == stride;
  auto result = even ? at::empty({count * stride}, whole.options())
                     : at::zeros({count * stride}, whole.options());
  const auto shaped = whole.view({axis.before, axis.extent, axis.after});
  for (std::int64_t r = 0; r < count; ++r) {
    const auto& piece = axis.pieces[static_cast<std::size_t>(r)];
    result.narrow(0, r * stride, piece.size * axis.row())
        .view({axis.before, piece.size, axis.after})
        .copy_(shaped.narrow(1, piece.offset, piece.size));
  }
  return result;
}

/// An all-to-all on this rank: the local tensor as (before, axis, between, axis, after), where one
/// axis is gathered, piece by piece, and the other scattered.
class Exchange {
 public:
  Exchange(const Step& step, const DeviceMesh& mesh, c10::IntArrayRef sizes)
      : gather_first_(step.dim < step.to_dim), me_(group_rank(mesh, step.mesh_dims)) {
    const auto gathered = Axis::split_by(step.from, step.dim, step.mesh_dims.back());
    const auto scattered = Axis::split_by(step.to, step.to_dim, step.mesh_dims.back());
    around_ = extents_around(
        gather_first_ ? std::vector{gathered, scattered} : std::vector{scattered, gathered},
        step.from, sizes, mesh);
    from_ = pieces_of(gathered.whole_extent(sizes, mesh, step.mesh_dims), mesh, step.mesh_dims);
    whole_ = scattered.whole_extent(sizes, mesh, step.mesh_dims);
    to_ = pieces_of(whole_, mesh, step.mesh_dims);
  }

  /// Whether no rank of the group has anything to send.
  bool is_empty() const { return rest() * whole_ * (from_.back().offset + from_.back().size) == 0; }
  std::int64_t gathered_mine() const { return from_[me_].size; }
  std::int64_t whole() const { return whole_; }

  std::vector<std::int64_t> shape(std::int64_t gathered, std::int64_t scattered) const {
    return {around_[0], gather_first_ ? gathered : scattered, around_[1],
            gather_first_ ? scattered : gathered, around_[2]};
  }

  /// The parts for each rank one after another. Slices of a leading axis lie so already.
  at::Tensor pack(const at::Tensor& whole) const {
    if (scatter_dim() == 1 && around_[0] == 1) return whole.view({-1});
    std::vector<at::Tensor> parts;
    for (const auto& piece : to_) {
      parts.push_back(whole.narrow(scatter_dim(), piece.offset, piece.size).reshape({-1}));
    }
    return at::cat(parts);
  }

  /// The parts of all ranks, each of `to_[me_]` of the scattered axis, side by side.
  at::Tensor unpack(const at::Tensor& received) const {
    if (gather_dim() == 1 && around_[0] == 1) return received;
    std::vector<at::Tensor> parts;
    std::int64_t offset = 0;
    for (const auto& piece : from_) {
      const auto numel = piece.size * to_[me_].size * rest();
      parts.push_back(received.narrow(0, offset, numel).view(shape(piece.size, to_[me_].size)));
      offset += numel;
    }
    return at::cat(parts, gather_dim()).view({-1});
  }

  /// Elements to and from each rank, `parts` numbers each.
  std::vector<std::int64_t> send_counts(std::int64_t parts) const {
    return counts(to_, from_[me_].size * rest() * parts);
  }
  std::vector<std::int64_t> receive_counts(std::int64_t parts) const {
    return counts(from_, to_[me_].size * rest() * parts);
  }
  std::int64_t received() const {
    const auto numbers = receive_counts(1);
    return std::accumulate(numbers.begin(), numbers.end(), std::int64_t{0});
  }

 private:
  std::int64_t gather_dim() const { return gather_first_ ? 1 : 3; }
  std::int64_t scatter_dim() const { return gather_first_ ? 3 : 1; }
  std::int64_t rest() const { return around_[0] * around_[1] * around_[2]; }

  static std::vector<std::int64_t> counts(const std::vector<Piece>& pieces, std::int64_t row) {
    std::vector<std::int64_t> result;
    for (const auto& piece : pieces) result.push_back(piece.size * row);
    return result;
  }

  bool gather_first_;
  std::size_t me_;
  std::int64_t whole_ = 0;
  std::vector<std::int64_t> around_;
  std::vector<Piece> from_, to_;
};

}  // namespace

comm::Communicator& group_of(const Step& step, const DeviceMesh& mesh) {
  return step.mesh_dims.size() == 1 ? mesh.group(step.mesh_dims.front())
                                    : mesh.group(step.mesh_dims);
}

at::Tensor flat(const at::Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg().contiguous().view({-1});
}

at::Tensor reals(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor).view({-1}) : tensor;
}

// The work keeps the tensors that it reads and writes alive as long as `rest` does.

Started all_gather_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                        c10::IntArrayRef sizes) {
  const auto axis = split_axis(step.from, step, mesh, sizes);
  const auto count = static_cast<std::int64_t>(axis.pieces.size());
  if (count == 1) return there(flat(local));
  const auto stride = axis.pieces.front().size * axis.row();
  const auto input = padded(flat(local), stride);
  const auto output = at::empty({count * stride}, local.options());
  if (stride == 0) return there(join(output, stride, axis));
  return {group_of(step, mesh).all_gather(reals(output), reals(input)),
          [input, output, stride, axis] { return join(output, stride, axis); }};
}

Started reduce_scatter_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                            c10::IntArrayRef sizes) {
  check_reducible(step, local);
  const auto axis = split_axis(step.to, step, mesh, sizes);
  if (axis.pieces.size() == 1) return there(flat(local));
  const auto stride = axis.pieces.front().size * axis.row();
  const auto input = separate(flat(local), stride, axis);
  const auto output = at::empty({stride}, local.options());
  const auto mine = output.narrow(0, 0, axis.mine(step, mesh).size * axis.row());
  if (stride == 0) return there(mine);
  return {group_of(step, mesh).reduce_scatter(reals(output), reals(input), step.op),
          [input, output, mine] { return mine; }};
}

Started all_reduce_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh) {
  check_reducible(step, local);
  auto& group = group_of(step, mesh);
  auto result = flat(local);
  if (group.size() == 1 || local.numel() == 0) return there(result);
  if (result.is_alias_of(local)) result = result.clone();
  return {group.all_reduce(reals(result), step.op), [result] { return result; }};
}

Started all_to_all_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                        c10::IntArrayRef sizes) {
  const Exchange exchange(step, mesh, sizes);
  if (exchange.is_empty()) return there(flat(local));
  const auto whole = flat(local).view(exchange.shape(exchange.gathered_mine(), exchange.whole()));
  const std::int64_t parts = local.is_complex() ? 2 : 1;
  const auto input = exchange.pack(whole);
  const auto output = at::empty({exchange.received()}, local.options());
  auto work = group_of(step, mesh)
                  .all_to_all(reals(output), reals(input), exchange.receive_counts(parts),
                              exchange.send_counts(parts));
  return {std::move(work), [exchange, input, output] { return exchange.unpack(output); }};
}

at::Tensor slice_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                      c10::IntArrayRef sizes) {
  const auto axis = split_axis(step.to, step, mesh, sizes);
  const auto& mine = axis.mine(step, mesh);
  return flat(local)
      .view({axis.before, axis.extent, axis.after})
      .narrow(1, mine.offset, mine.size)
      .contiguous();
}

at::Tensor make_partial_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh) {
  const auto value = flat(local);
  if (group_rank(mesh, step.mesh_dims) == 0) return value;
  switch (step.op) {
    case ReduceOp::kSum:
      return at::zeros_like(value);
    case ReduceOp::kProduct:
      return at::ones_like(value);
    case ReduceOp::kAvg:
    case ReduceOp::kMax:
    case ReduceOp::kMin:
      return value;  // any number of equal values reduce to themselves
  }
  fail("internal: unknown reduction");
}

}  // namespace tessera::detail
