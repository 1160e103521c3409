#include "buffers.h"
#include "tessera/comm/detail/scopes.h"

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <numeric>

#include "tessera/core/error.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/kernels/detail/lists.h"

namespace tessera::fsdp {

// DataMesh stores which mesh dimension is for shards and which is for replicas.

DataMesh::DataMesh(const DeviceMesh& mesh) : all(mesh) {
  TESSERA_CHECK(
      mesh && (mesh.ndim() == 1 || mesh.ndim() == 2), "fully_shard: the mesh is ",
      mesh ? to_string(mesh) : "undefined",
      "; pass one dimension to shard over, or two to replicate and shard over, for example "
      "mesh[\"dp\"] or mesh[{\"dp_replicate\", \"dp\"}]");
  if (mesh.ndim() == 1) {
    shard = mesh;
    return;
  }
  const std::vector<std::string>& names = mesh.shape().names();
  // mesh[name] and `mesh` have the same root mesh, which tensor parallelism must also use.
  TESSERA_CHECK(!names.empty(), "fully_shard: the dimensions of ", to_string(mesh),
                " have no names; make the mesh with names for its dimensions");
  replicate = mesh[names[0]];
  shard = mesh[names[1]];
}

DataMesh DataMesh::replicating(const DeviceMesh& mesh) {
  TESSERA_CHECK(
      mesh && mesh.ndim() == 1, "replicate: the mesh is ", mesh ? to_string(mesh) : "undefined",
      mesh && mesh.ndim() == 2 ? "; replicate needs a mesh of one dimension: pass mesh.flatten()"
                               : "; pass one dimension, for example mesh[\"dp\"]");
  DataMesh result;
  result.all = result.replicate = mesh;
  const auto rank = static_cast<std::size_t>(mesh.local_rank());
  // The shard mesh of replicate() contains only this rank, so nothing is gathered or scattered.
  result.shard = DeviceMesh(mesh.world(), {mesh.ranks()[rank]}, MeshShape({1}));
  return result;
}

std::vector<DeviceMesh> DataMesh::data_dims() const {
  return replicate ? std::vector{replicate, shard} : std::vector{shard};
}

c10::Device DataMesh::device() const {
  return all.device();
}

bool is_slice(const DeviceMesh& part, const DeviceMesh& whole) {
  const std::vector<int>& all = whole.ranks();
  return part == whole || std::ranges::all_of(part.ranks(), [&](int rank) {
           return std::ranges::find(all, rank) != all.end();
         });
}

// segments_of() computes the offset of each shard in a flat buffer. unpack() and pack() copy
// between flat buffers and unsharded tensors. None of these functions communicates.

namespace {

/// Two views of the same elements of a parameter: in the unsharded tensor, in the packed buffer.
struct Piece {
  at::Tensor unsharded;
  at::Tensor packed;
};

Piece full_rows(const at::Tensor& unsharded, const at::Tensor& buffer, const Segment& segment,
                std::int64_t ranks) {
  std::vector<std::int64_t> sizes = segment.shape.sizes;
  sizes[0] = segment.shape.chunk();
  sizes.insert(sizes.begin(), ranks);
  const at::Tensor packed = buffer.narrow(0, 0, ranks)
                                .narrow(1, segment.offset, segment.shape.padded_numel())
                                .unflatten(1, at::IntArrayRef(sizes).slice(1));
  return {unsharded.narrow(0, 0, ranks * sizes[1]).unflatten(0, {ranks, sizes[1]}), packed};
}

Piece rows_of(const at::Tensor& unsharded, const at::Tensor& buffer, const Segment& segment,
              std::int64_t rank) {
  const ShardShape& shape = segment.shape;
  return {shape.rows_of(unsharded, rank),
          shape.by_parts(shard_of(buffer.select(0, rank), segment, rank))};
}

/// Returns the Pieces to copy for one parameter. Ranks with unpadded shards share one Piece if
/// dimension 0 is split.
std::vector<Piece> pieces_of(const at::Tensor& unsharded, const at::Tensor& buffer,
                             const Segment& segment) {
  const ShardShape& shape = segment.shape;
  std::vector<Piece> pieces;
  std::int64_t rank = 0;
  if (shape.splits_rows() && shape.padded_numel() > 0) {
    rank = shape.sizes[0] / shape.chunk();
    pieces.push_back(full_rows(unsharded, buffer, segment, rank));
  }
  for (; rank < shape.ranks && shape.numel(rank) > 0; ++rank) {
    pieces.push_back(shape.dim ? rows_of(unsharded, buffer, segment, rank)
                               : Piece{unsharded, shard_of(buffer.select(0, rank), segment, rank)});
  }
  return pieces;
}

/// Sets the padding of `segment` in all rows of `buffer` to zero.
void clear_padding(const at::Tensor& buffer, const Segment& segment) {
  const ShardShape& shape = segment.shape;
  const std::int64_t room = shape.padded_numel();
  std::int64_t filled = shape.ranks;
  while (room > 0 && filled > 0 && shape.numel(filled - 1) == 0) {
    --filled;
  }
  if (filled < shape.ranks) {
    buffer.narrow(0, filled, shape.ranks - filled).narrow(1, segment.offset, room).zero_();
  }
  if (const std::int64_t used = filled > 0 ? shape.numel(filled - 1) : room; used < room) {
    buffer.select(0, filled - 1).narrow(0, segment.offset + used, room - used).zero_();
  }
}

std::int64_t end_of(const Segment& segment) {
  return segment.offset + segment.shape.padded_numel();
}

/// Returns the smaller dtype. An offset (in elements) that is aligned for the smaller dtype is also
/// aligned for the larger dtype.
c10::ScalarType narrower(c10::ScalarType a, c10::ScalarType b) {
  return c10::elementSize(a) < c10::elementSize(b) ? a : b;
}

}  // namespace

std::vector<Segment> segments_of(const std::vector<ShardShape>& shapes, c10::ScalarType dtype) {
  const std::int64_t unit = kTensorAlignment / static_cast<std::int64_t>(c10::elementSize(dtype));
  std::vector<Segment> segments;
  for (const ShardShape& shape : shapes) {
    // Equal shard sizes give equal offsets on all ranks, so one collective can transfer all
    // parameters.
    segments.push_back({shape, flat_numel(segments),
                        detail::round_up(shape.padded_numel(), unit) - shape.padded_numel()});
  }
  return segments;
}

std::int64_t flat_numel(const std::vector<Segment>& segments) {
  return segments.empty() ? 0 : end_of(segments.back()) + segments.back().gap;
}

void clear_gaps(const at::Tensor& buffer, const std::vector<Segment>& segments) {
  for (const Segment& segment : segments) {
    if (segment.gap > 0) {
      buffer.narrow(-1, end_of(segment), segment.gap).zero_();
    }
  }
}

at::Tensor shard_of(const at::Tensor& flat, const Segment& segment, std::int64_t rank) {
  return flat.narrow(0, segment.offset, segment.shape.numel(rank))
      .view(segment.shape.shard_sizes(rank));
}

FlatBufferLayout::FlatBufferLayout(const std::vector<ShardShape>& shapes, c10::ScalarType dtype,
                                   const MixedPrecisionPolicy& policy, const ShardHome& home,
                                   c10::Device device)
    : dtype_(dtype),
      // Integer and boolean parameters are not cast to the floating-point compute dtype.
      compute_dtype_(c10::isFloatingType(dtype) ? policy.param_dtype.value_or(dtype) : dtype),
      // As in FSDP2, gradients are reduced in the compute dtype if reduce_dtype is not set.
      reduce_dtype_(c10::isFloatingType(dtype) ? policy.reduce_dtype.value_or(compute_dtype_)
                                               : compute_dtype_),
      // A segment has the same offset in buffers of dtype_ and in buffers of compute_dtype_.
      segments_(segments_of(shapes, narrower(dtype_, compute_dtype_))),
      home_(home),
      device_(device) {}

bool FlatBufferLayout::splits_rows() const {
  return std::ranges::all_of(segments_,
                             [](const Segment& segment) { return segment.shape.splits_rows(); });
}

/// Copies all shards in one foreach call, which launches a single GPU kernel.
void unpack(const at::Tensor& gathered, const std::vector<Segment>& segments,
            const std::vector<at::Tensor>& unsharded) {
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    std::vector<Piece> pieces = pieces_of(unsharded[i], gathered, segments[i]);
    if (!segments[i].shape.dim && !pieces.empty()) {
      pieces.erase(pieces.begin() + 1, pieces.end());
    }
    for (Piece& piece : pieces) {
      to.push_back(std::move(piece.unsharded));
      from.push_back(std::move(piece.packed));
    }
  }
  kernels::copy_all(to, from);
}

void pack(const std::vector<at::Tensor>& unsharded, const std::vector<Segment>& segments,
          const at::Tensor& buffer) {
  clear_gaps(buffer, segments);
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    // A rank that did not use the parameter sends zeros, because the other ranks expect data from
    // every rank.
    if (!unsharded[i].defined()) {
      buffer.narrow(1, segments[i].offset, segments[i].shape.padded_numel()).zero_();
      continue;
    }
    clear_padding(buffer, segments[i]);
    for (Piece& piece : pieces_of(unsharded[i], buffer, segments[i])) {
      to.push_back(std::move(piece.packed));
      from.push_back(std::move(piece.unsharded));
    }
  }
  kernels::copy_all(to, from);
}

// Reuses communication buffers of earlier units, because libtorch's caching allocator would not
// limit the cached memory of a stream. On a CPU all events are null, and waits do nothing.

namespace {

/// A reused buffer is at most kWaste times larger than the requested size. Larger buffers are
/// freed.
constexpr std::int64_t kWaste = 2;

}  // namespace

BufferPool::Buffer BufferPool::acquire(std::int64_t numel, c10::ScalarType dtype, comm::Lane lane) {
  const std::int64_t bytes = numel * static_cast<std::int64_t>(c10::elementSize(dtype));
  at::Tensor memory;
  if (const auto found = best_fit(bytes, lane); found != idle_.end()) {
    streams_->wait(lane, found->event);
    memory = std::move(found->bytes);
    idle_.erase(found);
  } else {
    // Idle memory of the wrong size is freed before the allocation, because both together would
    // raise the memory peak.
    drop(lane);
    memory = at::empty({numel}, at::dtype(dtype).device(device_)).view(at::kByte);
  }
  at::Tensor tensor = memory.narrow(0, 0, bytes).view(dtype);
  return {std::move(tensor), std::move(memory), lane};
}

std::vector<BufferPool::Idle>::iterator BufferPool::best_fit(std::int64_t bytes, comm::Lane lane) {
  auto best = idle_.end();
  for (auto idle = idle_.begin(); idle != idle_.end(); ++idle) {
    const std::int64_t room = idle->bytes.numel();
    const bool fits = idle->lane == lane && room >= bytes && room <= kWaste * bytes;
    if (fits && (best == idle_.end() || room < best->bytes.numel())) {
      best = idle;
    }
  }
  return best;
}

void BufferPool::release(Buffer buffer, comm::StreamEventPtr event) {
  idle_.push_back({std::move(buffer.bytes), buffer.lane, std::move(event)});
}

void BufferPool::drop(comm::Lane lane) {
  std::erase_if(idle_, [&](const Idle& idle) {
    if (idle.lane != lane) {
      return false;
    }
    // The stream `lane` first waits for the last user of the buffer, because the allocator can
    // reuse the freed memory on `lane` at once.
    streams_->wait(lane, idle.event);
    return true;
  });
}

void BufferPool::clear() {
  for (const comm::Lane lane :
       {comm::Lane::kCompute, comm::Lane::kAllGather, comm::Lane::kReduceScatter}) {
    drop(lane);
  }
}

std::int64_t BufferPool::idle_bytes() const {
  return std::accumulate(
      idle_.begin(), idle_.end(), std::int64_t{0},
      [](std::int64_t sum, const Idle& idle) { return sum + idle.bytes.numel(); });
}

// Autograd saves the unsharded tensors for backward, so the tensors are made only once. Only the
// storage of these tensors is freed and allocated again.

namespace {

using detail::round_up;

/// Returns the mesh of the ranks that cache gathered memory together
/// (Options::post_forward_mesh_size). Returns an empty mesh if `size` is 1 or the number of all
/// ranks.
DeviceMesh post_forward_mesh(const DataMesh& mesh, std::int64_t size) {
  const std::int64_t ranks = mesh.shard.size();
  if (size == 1 || size == ranks) {
    return {};
  }
  // The mesh consists of neighbouring ranks, which usually share a machine and its fast links.
  const auto first = mesh.shard.ranks().begin() + mesh.shard.local_rank() / size * size;
  const std::vector<std::string>& names = mesh.shard.shape().names();
  const std::string name = detail::concat(names.empty() ? "dp" : names.front(), "/", size);
  return {mesh.shard.world(), std::vector<int>(first, first + size), MeshShape({size}, {name})};
}

}  // namespace

UnshardedTensors::UnshardedTensors(const std::vector<Segment>& segments, c10::ScalarType dtype,
                                   c10::Device device, bool padded, std::int64_t pieces) {
  const auto itemsize = static_cast<std::int64_t>(c10::elementSize(dtype));
  std::vector<std::int64_t> numels;
  std::int64_t bytes = 0;
  for (const Segment& segment : segments) {
    // With `padded`, each tensor's memory ends with padding, because an all-gather writes shards of
    // equal size.
    numels.push_back(padded ? segment.shape.ranks * segment.shape.padded_numel()
                            : c10::multiply_integers(segment.shape.sizes));
    bytes += round_up(itemsize * numels.back(), kTensorAlignment);
  }
  bytes_ = round_up(bytes, kTensorAlignment * pieces);
  // All unsharded tensors share one storage, because PostForwardShard gathers one contiguous range.
  storage_ = at::empty({0}, at::dtype(at::kByte).device(device)).storage();
  const auto at_offset = [&](const std::vector<std::int64_t>& sizes, std::int64_t offset) {
    return tessera::detail::tensor_over(storage_, offset / itemsize, sizes, dtype);
  };
  flat_ = at_offset({bytes_ / itemsize}, 0);
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    tensors_.push_back(at_offset(segments[i].shape.sizes, offset));
    if (padded) {
      padded_.push_back(at_offset({numels[i]}, offset));
    }
    offset += round_up(itemsize * numels[i], kTensorAlignment);
  }
}

void UnshardedTensors::allocate() {
  tessera::detail::set_memory(
      storage_, storage_.allocator()->allocate(static_cast<std::size_t>(bytes_)), bytes_);
}

/// The storage owns `memory`, because views of the storage can outlive the caller's reference.
void UnshardedTensors::lend(at::Tensor memory) {
  void* const data = memory.mutable_data_ptr();
  const c10::Device device = memory.device();
  auto* const held = new at::Tensor(std::move(memory));
  const auto drop = [](void* tensor) { delete static_cast<at::Tensor*>(tensor); };
  tessera::detail::set_memory(storage_, at::DataPtr(data, held, drop, device), bytes_);
}

void UnshardedTensors::free() {
  tessera::detail::free_memory(storage_);
}

PostForwardShard::PostForwardShard(const DataMesh& mesh, std::int64_t size)
    : mesh_(post_forward_mesh(mesh, size)) {}

void PostForwardShard::keep(const at::Tensor& memory, comm::Streams& streams) {
  const std::int64_t piece = memory.numel() / count();
  piece_ = memory.narrow(0, mesh_.local_rank() * piece, piece).clone();
  copied_ = streams.record(comm::Lane::kCompute);
}

comm::WorkPtr PostForwardShard::start_gather(const at::Tensor& memory, const std::string& label,
                                             comm::Streams& streams) {
  streams.wait(comm::Lane::kAllGather, copied_);
  // drop() can reset piece_ before the collective has read the memory, so a second reference is
  // needed.
  sent_ = piece_;
  const comm::PurposeScope purpose(group(), label);
  return group().all_gather(memory, sent_);
}

}  // namespace tessera::fsdp
