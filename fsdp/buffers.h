#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/streams.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/detail/rounding.h"
#include "tessera/export.h"
#include "tessera/fsdp/options.h"
#include "tessera/mesh/device_mesh.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::fsdp {

/// The mesh passed to fully_shard: one shard dimension, optionally preceded by one replica
/// dimension (HSDP).
struct DataMesh {
  /// Throws Error unless `mesh` has one or two dimensions.
  explicit DataMesh(const DeviceMesh& mesh);
  /// Makes the DataMesh of replicate(): the only dimension of `mesh` is for replicas. Throws Error
  /// unless `mesh` has one dimension.
  static DataMesh replicating(const DeviceMesh& mesh);

  DeviceMesh all;        ///< the mesh that the program passed to fully_shard
  DeviceMesh shard;      ///< the 1-D submesh over which parameters are sharded
  DeviceMesh replicate;  ///< the 1-D submesh of replicas; empty without replicas

  std::int64_t replicas() const { return replicate ? replicate.size() : 1; }
  std::int64_t ranks() const { return shard.size() * replicas(); }
  /// The mesh on which the sharded parameters are distributed tensors.
  const DeviceMesh& persistent() const { return replicate ? all : shard; }
  /// The mesh dimensions along which ranks have different parts of the batch, outermost first.
  std::vector<DeviceMesh> data_dims() const;
  c10::Device device() const;

 private:
  DataMesh() = default;
};

bool is_slice(const DeviceMesh& part, const DeviceMesh& whole);

/// The split of a tensor of `sizes` along dimension `dim` over `ranks` ranks. As with torch.chunk,
/// the last ranks may have few or no rows (indices of `dim`). Without `dim` each rank has the whole
/// tensor. A flat buffer has as much memory for each rank's shard as for the shard of rank 0.
///
/// A fused weight consists of `parts` equal blocks along `dim`, and each block is split separately:
/// the shard of a rank contains that rank's rows of the first block, then the rank's rows of the
/// second block, and so on.
struct ShardShape {
  std::vector<std::int64_t> sizes;
  // The dimension that is split. If `dim` is empty, rows() returns 1 and row_numel() returns the
  // number of all elements, so that code for flat buffers needs no special case.
  std::optional<std::int64_t> dim = 0;
  std::int64_t ranks = 1;
  std::int64_t parts = 1;  ///< number of equal blocks of a fused weight

  /// Whether the concatenation of the shards of all ranks is the whole tensor.
  bool splits_rows() const { return dim == std::int64_t{0} && parts == 1; }
  /// The number of rows in rank 0's shard of one block of a fused weight; 1 if `dim` is empty.
  std::int64_t chunk() const { return dim ? detail::ceil_div(extent(), ranks) : 1; }
  std::int64_t rows(std::int64_t rank) const { return dim ? chunk_size(extent(), ranks, rank) : 1; }
  /// The index of the first row of `rank` within one block of a fused weight.
  std::int64_t first_row(std::int64_t rank) const {
    return dim ? chunk_offset(extent(), ranks, rank) : 0;
  }
  std::vector<std::int64_t> shard_sizes(std::int64_t rank) const {
    std::vector<std::int64_t> shard = sizes;
    if (dim) {
      shard[static_cast<std::size_t>(*dim)] = parts * rows(rank);
    }
    return shard;
  }
  std::int64_t numel(std::int64_t rank) const { return rows(rank) * row_numel(); }
  std::int64_t padded_numel() const { return chunk() * row_numel(); }

  // rows_of() and by_parts() return views in which `dim` is two dimensions, (parts, rows).
  // rows_of() returns the rows of `unsharded` that belong to `rank`. by_parts(), applied to the
  // shard of `rank`, returns a view of the same sizes.
  at::Tensor rows_of(const at::Tensor& unsharded, std::int64_t rank) const {
    return by_parts(unsharded).narrow(*dim + 1, first_row(rank), rows(rank));
  }
  at::Tensor by_parts(const at::Tensor& tensor) const {
    return tensor.unflatten(*dim, {parts, tensor.size(*dim) / parts});
  }

 private:
  std::int64_t extent() const { return sizes[static_cast<std::size_t>(*dim)] / parts; }
  /// The number of elements at one row index, summed over all blocks; without `dim`, the number of
  /// elements of the tensor.
  std::int64_t row_numel() const {
    std::int64_t numel = parts;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      numel *= dim && i == static_cast<std::size_t>(*dim) ? 1 : sizes[i];
    }
    return numel;
  }
};

/// The memory in which a unit's shards and their gradients are stored.
struct ShardHome {
  c10::Device device;
  bool pinned = false;  ///< whether the shards are in page-locked memory
  /// Whether Options::offload_policy is set, so that gradients are added on the CPU.
  bool offloaded = false;
};

/// The alignment, in bytes, of the tensors in one buffer: a multiple of the widest memory access of
/// collectives and kernels.
inline constexpr std::int64_t kTensorAlignment = 64;

/// The place of one parameter's shard in a flat buffer of shards.
struct Segment {
  ShardShape shape;
  std::int64_t offset = 0;  ///< index of the segment's first element in the flat buffer
  std::int64_t gap = 0;     ///< number of unused elements between this segment and the next
};

/// Returns Segments for shards of the given shapes, one after another in a flat buffer. Each
/// segment, and each rank's row of a gathered buffer, begins at a multiple of kTensorAlignment in a
/// buffer of type `dtype`.
std::vector<Segment> segments_of(const std::vector<ShardShape>& shapes, c10::ScalarType dtype);

/// The number of elements in a flat buffer of `segments`, including the gaps between segments.
std::int64_t flat_numel(const std::vector<Segment>& segments);

/// Sets the gaps in `buffer` (..., flat numel) to zero. Gaps are sent with the segments, so the
/// values of gaps must be the same in every run.
void clear_gaps(const at::Tensor& buffer, const std::vector<Segment>& segments);

/// Returns a view of the shard of `rank` in `flat`, the flat buffer of that rank.
at::Tensor shard_of(const at::Tensor& flat, const Segment& segment, std::int64_t rank);

/// The layout of a parameter group's shards and unsharded tensors: sizes, types and devices. A
/// layout contains no tensors, does not communicate, and is the same on every rank.
///
/// The shards are one after another in one flat buffer, each padded to rank 0's size and aligned.
/// If the shards have the compute type, an all-gather sends the flat buffer without a copy.
class FlatBufferLayout {
 public:
  /// `shapes`: the shapes of the parameters (at least one), all split over the same ranks. `dtype`:
  /// the type of the parameters. `device`: the device on which this rank computes.
  FlatBufferLayout(const std::vector<ShardShape>& shapes, c10::ScalarType dtype,
                   const MixedPrecisionPolicy& policy, const ShardHome& home, c10::Device device);

  const std::vector<Segment>& segments() const { return segments_; }
  /// The types of the shards, of all-gathers and computation, and of gradient reductions.
  c10::ScalarType dtype() const { return dtype_; }
  c10::ScalarType compute_dtype() const { return compute_dtype_; }
  c10::ScalarType reduce_dtype() const { return reduce_dtype_; }
  const ShardHome& home() const { return home_; }
  c10::Device device() const { return device_; }
  std::int64_t ranks() const { return segments_.front().shape.ranks; }

  /// Whether the unsharded tensors are the shards themselves, so that nothing is gathered, cast or
  /// moved.
  bool shares_memory() const {
    return ranks() == 1 && compute_dtype_ == dtype_ && home_.device == device_;
  }
  /// Whether the shards are in one flat buffer; otherwise each shard stays in separate memory.
  bool has_flat() const { return ranks() > 1 || home_.pinned; }
  /// Whether every parameter is split on dimension 0 and not fused. The concatenated shards of all
  /// ranks then give the parameter's values followed by padding.
  bool splits_rows() const;

 private:
  c10::ScalarType dtype_;
  c10::ScalarType compute_dtype_;
  c10::ScalarType reduce_dtype_;
  std::vector<Segment> segments_;
  ShardHome home_;
  c10::Device device_;
};

/// Joins the gathered shards of all ranks: copies `gathered` (ranks, flat numel) into `unsharded`,
/// which has one contiguous tensor of segment.shape.sizes for each segment. The types can differ.
void unpack(const at::Tensor& gathered, const std::vector<Segment>& segments,
            const std::vector<at::Tensor>& unsharded);

/// The inverse of unpack: copies `unsharded` into `buffer` (ranks, flat numel) and casts to the
/// buffer's type. Padding, gaps, and segments whose tensor is undefined are set to zero. The
/// tensors of `unsharded` can have any strides.
void pack(const std::vector<at::Tensor>& unsharded, const std::vector<Segment>& segments,
          const at::Tensor& buffer);

/// BufferPool is a pool of communication buffers: a buffer that one unit releases serves the next
/// unit. The pool caches little idle memory, because a buffer that does not fit the next request is
/// freed before a new buffer is allocated.
class BufferPool {
 public:
  struct Buffer {
    at::Tensor tensor;  ///< a view of `bytes` that has the requested size and type
    at::Tensor bytes;   ///< all bytes of this buffer; `tensor` is a view
    comm::Lane lane;    ///< the stream on which the buffer was allocated
  };

  BufferPool(comm::StreamsPtr streams, c10::Device device)
      : streams_(std::move(streams)), device_(device) {}

  /// Returns an uninitialised buffer of `numel` elements for use in the stream `lane`, which waits
  /// for the buffer's last user. Must be called while `lane` is the current stream.
  Buffer acquire(std::int64_t numel, c10::ScalarType dtype, comm::Lane lane);
  /// Returns a buffer to the pool. The buffer stays in use until `event` has passed.
  void release(Buffer buffer, comm::StreamEventPtr event);
  /// Frees the idle buffers of the stream `lane`, after the stream has waited for their users.
  void drop(comm::Lane lane);
  void clear();
  std::int64_t idle_bytes() const;

 private:
  struct Idle {
    at::Tensor bytes;
    comm::Lane lane;
    comm::StreamEventPtr event;
  };

  std::vector<Idle>::iterator best_fit(std::int64_t bytes, comm::Lane lane);

  comm::StreamsPtr streams_;
  c10::Device device_;
  std::vector<Idle> idle_;
};

/// The unsharded tensors of a parameter group, all in one storage. The storage can be freed and
/// allocated a second time while tensors (parameters, and tensors saved by autograd) point to it;
/// FSDP2 calls this "storage resize". Freeing the storage loses its contents. Version counters do
/// not change, so autograd accepts the tensors when the storage has its contents back.
class UnshardedTensors {
 public:
  UnshardedTensors() = default;
  /// Makes one tensor for each of `segments`, without allocating memory. `padded`: each tensor has
  /// room for the padded shards of all ranks (split on dimension 0), so that an all-gather can
  /// write into the tensor. The storage can be cut into `pieces` equal parts.
  UnshardedTensors(const std::vector<Segment>& segments, c10::ScalarType dtype, c10::Device device,
                   bool padded, std::int64_t pieces);

  bool allocated() const { return storage_ && storage_.nbytes() > 0; }
  std::int64_t bytes() const { return bytes_; }
  void allocate();
  /// Makes the storage use `memory`, which is at least as large as the storage, until free().
  void lend(at::Tensor memory);
  void free();

  const at::Tensor& flat() const { return flat_; }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  /// The tensors, flat and with their padding; empty unless the constructor got `padded`.
  const std::vector<at::Tensor>& padded() const { return padded_; }

 private:
  c10::Storage storage_;
  std::int64_t bytes_ = 0;
  at::Tensor flat_;
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> padded_;
};

/// PostForwardShard caches a part of a parameter group's gathered memory on each of a few
/// neighbouring ranks (Options::post_forward_mesh_size), among which backward gathers (hpZ of
/// ZeRO++). The parts are equal, larger than a shard, and can divide a parameter anywhere.
class PostForwardShard {
 public:
  PostForwardShard(const DataMesh& mesh, std::int64_t size);

  bool enabled() const { return static_cast<bool>(mesh_); }
  /// The number of equal parts that the gathered memory is cut into.
  std::int64_t count() const { return mesh_ ? mesh_.size() : 1; }
  bool kept() const { return piece_.defined(); }
  /// Copies this rank's part of `memory` on the compute stream. The length of `memory` must be a
  /// multiple of count().
  void keep(const at::Tensor& memory, comm::Streams& streams);
  /// Starts the all-gather of the cached parts into `memory`. The all-gather stream first waits for
  /// keep()'s copy of this rank's part. `label` is the unit's name in messages. Collective over
  /// group().
  comm::WorkPtr start_gather(const at::Tensor& memory, const std::string& label,
                             comm::Streams& streams);
  /// Releases the reference to the sent part. To be called when the gather has ended and the stream
  /// that owns piece_ has waited for the gather.
  void end_gather() { sent_.reset(); }
  void drop() { piece_.reset(); }
  /// The process group of the ranks that cache parts. The first call creates the group, which is
  /// collective over these ranks.
  comm::Communicator& group() { return mesh_.group(); }

 private:
  DeviceMesh mesh_;  ///< the 1-D mesh of the caching ranks; empty if the option is off
  at::Tensor piece_;
  comm::StreamEventPtr copied_;  ///< event after the copy of this rank's part into piece_
  at::Tensor sent_;              ///< second reference to piece_, while a collective reads piece_
};

}  // namespace tessera::fsdp
TESSERA_API_FOR_TEST_END
