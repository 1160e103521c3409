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

  /// The function that the program called, for messages: "fully_shard" or "replicate".
  const char* caller() const { return replicate == all ? "replicate" : "fully_shard"; }
  std::int64_t replicas() const { return replicate ? replicate.size() : 1; }
  std::int64_t ranks() const { return shard.size() * replicas(); }
  const DeviceMesh& persistent() const { return replicate ? all : shard; }
  /// The mesh dimensions whose ranks have different parts of the batch, outermost first.
  std::vector<DeviceMesh> data_dims() const;
  c10::Device device() const;

 private:
  DataMesh() = default;
};

bool is_slice(const DeviceMesh& part, const DeviceMesh& whole);

/// How a tensor of shape `sizes` is split along dimension `dim` over `ranks` ranks, as by
/// torch.chunk. If `dim` is empty, each rank has the whole tensor. A "row" is one index of `dim`.
///
/// A fused weight has `parts` equal blocks along `dim`. Each block is split separately. A rank's
/// shard contains the rank's rows of each block, block after block.
struct ShardShape {
  std::vector<std::int64_t> sizes;
  // The dimension that is split. Without a dimension, rows() returns 1 and row_numel() returns the
  // number of all elements.
  std::optional<std::int64_t> dim = 0;
  std::int64_t ranks = 1;
  std::int64_t parts = 1;  ///< number of blocks of a fused weight; 1 for other tensors

  /// Whether the concatenation of the shards of all ranks is the whole tensor.
  bool splits_rows() const { return dim == std::int64_t{0} && parts == 1; }
  /// The number of rows in rank 0's shard of one block; 1 if `dim` is empty.
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

  // rows_of() and by_parts() return views with dimension `dim` split into two dimensions (parts,
  // rows). rows_of() returns the rows of `rank`.
  at::Tensor rows_of(const at::Tensor& unsharded, std::int64_t rank) const {
    return by_parts(unsharded).narrow(*dim + 1, first_row(rank), rows(rank));
  }
  at::Tensor by_parts(const at::Tensor& tensor) const {
    return tensor.unflatten(*dim, {parts, tensor.size(*dim) / parts});
  }

 private:
  std::int64_t extent() const { return sizes[static_cast<std::size_t>(*dim)] / parts; }
  /// The number of elements in one row, times the number of blocks. Without `dim`, the number of
  /// elements of the tensor.
  std::int64_t row_numel() const {
    std::int64_t numel = parts;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      numel *= dim && i == static_cast<std::size_t>(*dim) ? 1 : sizes[i];
    }
    return numel;
  }
};

/// Where a unit's shards and their gradients are stored.
struct ShardHome {
  c10::Device device;
  bool pinned = false;  ///< whether the shards are in page-locked memory
  bool offloaded = false;
};

/// The alignment, in bytes, of the tensors in one buffer: a multiple of the widest memory access of
/// collectives and kernels.
inline constexpr std::int64_t kTensorAlignment = 64;

/// The place of one parameter's shard in a flat buffer of shards.
struct Segment {
  ShardShape shape;
  std::int64_t offset = 0;  ///< index of the segment's first element in the flat buffer
  std::int64_t gap = 0;     ///< number of padding elements between this segment and the next
};

/// Returns one Segment for each of `shapes`, one after another in a flat buffer. Segments and the
/// buffer's length are aligned to kTensorAlignment bytes for `dtype`.
std::vector<Segment> segments_of(const std::vector<ShardShape>& shapes, c10::ScalarType dtype);

/// The number of elements in a flat buffer of `segments`, including padding between segments.
std::int64_t flat_numel(const std::vector<Segment>& segments);

/// Sets the padding between segments in `buffer` (..., flat numel) to zero. Collectives also send
/// the padding.
void clear_gaps(const at::Tensor& buffer, const std::vector<Segment>& segments);

at::Tensor shard_of(const at::Tensor& flat, const Segment& segment, std::int64_t rank);

/// The shapes, dtypes and devices of the shards and unsharded tensors of a parameter group. Equal
/// on all ranks. Does not contain tensors.
///
/// One flat buffer contains all shards. Each shard is padded to the size of rank 0's shard.
class FlatBufferLayout {
 public:
  /// `shapes`: the shapes of the parameters (at least one), all split over the same ranks. `dtype`:
  /// the dtype of the parameters. `device`: the device on which this rank computes.
  FlatBufferLayout(const std::vector<ShardShape>& shapes, c10::ScalarType dtype,
                   const MixedPrecisionPolicy& policy, const ShardHome& home, c10::Device device);

  const std::vector<Segment>& segments() const { return segments_; }
  /// The dtypes of the shards, of all-gathers and computation, and of gradient reductions.
  c10::ScalarType dtype() const { return dtype_; }
  c10::ScalarType compute_dtype() const { return compute_dtype_; }
  c10::ScalarType reduce_dtype() const { return reduce_dtype_; }
  const ShardHome& home() const { return home_; }
  c10::Device device() const { return device_; }
  std::int64_t ranks() const { return segments_.front().shape.ranks; }

  /// Whether the shards themselves serve as the unsharded tensors: nothing is gathered, cast or
  /// moved.
  bool shares_memory() const {
    return ranks() == 1 && compute_dtype_ == dtype_ && home_.device == device_;
  }
  /// Whether the shards are in one flat buffer. Otherwise each shard has separate memory.
  bool has_flat() const { return ranks() > 1 || home_.pinned; }
  /// Whether all parameters are split on dimension 0 and none is a fused weight. The padded shards
  /// of all ranks, concatenated, are then the parameter plus padding.
  bool splits_rows() const;

 private:
  c10::ScalarType dtype_;
  c10::ScalarType compute_dtype_;
  c10::ScalarType reduce_dtype_;
  std::vector<Segment> segments_;
  ShardHome home_;
  c10::Device device_;
};

/// Copies the flat buffers of all ranks, `gathered` (ranks, flat numel), into `unsharded`, one
/// contiguous tensor for each segment. The dtypes can differ.
void unpack(const at::Tensor& gathered, const std::vector<Segment>& segments,
            const std::vector<at::Tensor>& unsharded);

/// The inverse of unpack(): copies `unsharded` (any strides) into `buffer` (ranks, flat numel), in
/// the dtype of `buffer`. Padding and the segments of undefined tensors become zero.
void pack(const std::vector<at::Tensor>& unsharded, const std::vector<Segment>& segments,
          const at::Tensor& buffer);

/// A pool of communication buffers. A unit reuses a buffer that another unit has released. Idle
/// buffers of unsuitable size are freed before an allocation.
class BufferPool {
 public:
  struct Buffer {
    at::Tensor tensor;  ///< a view of `bytes` with the requested numel and dtype
    at::Tensor bytes;   ///< the whole memory of this buffer
    comm::Lane lane;    ///< the stream on which the buffer was allocated
  };

  BufferPool(comm::StreamsPtr streams, c10::Device device)
      : streams_(std::move(streams)), device_(device) {}

  /// Returns an uninitialized buffer of `numel` elements for the current stream `lane`. `lane`
  /// first waits for the previous user of the buffer.
  Buffer acquire(std::int64_t numel, c10::ScalarType dtype, comm::Lane lane);
  /// Returns a buffer to the pool. The buffer stays in use until `event` has passed.
  void release(Buffer buffer, comm::StreamEventPtr event);
  /// Frees the idle buffers of the stream `lane`. First `lane` waits for the users of the buffers.
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

/// The unsharded tensors of a parameter group, in one storage. Allocating the storage again changes
/// no version counter, so autograd accepts the tensors in backward. The caller must fill a new
/// storage with the old values.
class UnshardedTensors {
 public:
  UnshardedTensors() = default;
  /// Makes one tensor for each of `segments`, without memory. `padded`: each tensor has room for
  /// the padded shards of all ranks, for an all-gather in place. The storage's size is a multiple
  /// of `pieces`.
  UnshardedTensors(const std::vector<Segment>& segments, c10::ScalarType dtype, c10::Device device,
                   bool padded, std::int64_t pieces);

  bool allocated() const { return storage_ && storage_.nbytes() > 0; }
  std::int64_t bytes() const { return bytes_; }
  void allocate();
  /// Until free(), the tensors use `memory`, which must be at least as large as the storage.
  void lend(at::Tensor memory);
  void free();

  const at::Tensor& flat() const { return flat_; }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  /// The tensors as 1-D views that include padding; empty without `padded` in the constructor.
  const std::vector<at::Tensor>& padded() const { return padded_; }

 private:
  c10::Storage storage_;
  std::int64_t bytes_ = 0;
  at::Tensor flat_;
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> padded_;
};

/// Caches a parameter group's gathered memory after forward, in equal parts on a few neighbouring
/// ranks (Options::post_forward_mesh_size; hpZ of ZeRO++). In backward, only these ranks
/// communicate.
class PostForwardShard {
 public:
  PostForwardShard(const DataMesh& mesh, std::int64_t size);

  bool enabled() const { return static_cast<bool>(mesh_); }
  /// The number of equal parts that the gathered memory is cut into.
  std::int64_t count() const { return mesh_ ? mesh_.size() : 1; }
  bool kept() const { return piece_.defined(); }
  /// Caches a copy of this rank's part of `memory`. The copy runs on the compute stream. The length
  /// of `memory` must be a multiple of count().
  void keep(const at::Tensor& memory, comm::Streams& streams);
  /// Starts the all-gather of the cached parts into `memory`. `label`: the unit's name in messages.
  /// Collective over group().
  comm::WorkPtr start_gather(const at::Tensor& memory, const std::string& label,
                             comm::Streams& streams);
  /// Releases this rank's part. The all-gather must have ended, and the stream that allocated the
  /// part must have waited for the all-gather.
  void end_gather() { sent_.reset(); }
  void drop() { piece_.reset(); }
  /// The process group of the ranks that cache parts. Collective over these ranks in the first
  /// call, which creates the group.
  comm::Communicator& group() { return mesh_.group(); }

 private:
  DeviceMesh mesh_;  ///< the 1-D mesh of the caching ranks; empty if the option is off
  at::Tensor piece_;
  comm::StreamEventPtr copied_;  ///< event after the copy into piece_
  at::Tensor sent_;              ///< keeps the memory of piece_ while a collective reads it
};

}  // namespace tessera::fsdp
TESSERA_API_FOR_TEST_END
