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
#include "tessera/comm/streams.h"
#include "tessera/core/detail/rounding.h"
#include "tessera/core/layout_math.h"
#include "tessera/export.h"
#include "tessera/fsdp/options.h"
#include "tessera/mesh/device_mesh.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::fsdp {

/// The mesh that fully_shard was given: one dimension that shards, and maybe one in front of it
/// that replicates (HSDP).
struct DataMesh {
  /// Throws Error for a mesh of other than one or two dimensions.
  explicit DataMesh(const DeviceMesh& mesh);
  /// The one dimension of `mesh` replicates, and each rank alone shards. Throws Error for a mesh of
  /// other than one dimension.
  static DataMesh replicating(const DeviceMesh& mesh);

  DeviceMesh all;        ///< what was given
  DeviceMesh shard;      ///< one dimension
  DeviceMesh replicate;  ///< no mesh without such a dimension

  std::int64_t replicas() const { return replicate ? replicate.size() : 1; }
  /// How many ranks compute gradients that are averaged.
  std::int64_t ranks() const { return shard.size() * replicas(); }
  /// The mesh of the persistent tensors.
  const DeviceMesh& persistent() const { return replicate ? all : shard; }
  /// The dimensions that have different parts of the batch, the outermost first.
  std::vector<DeviceMesh> data_dims() const;
  /// Where this rank computes.
  c10::Device device() const;

 private:
  DataMesh() = default;
};

/// Whether all ranks of `part` are of `whole`.
bool is_slice(const DeviceMesh& part, const DeviceMesh& whole);

/// How a tensor of `sizes` is split on `dim` over `ranks`: as torch.chunk does, so trailing ranks
/// may hold less or nothing. Without a dimension each rank has all of it. In flat buffers every
/// rank's shard takes as much room as rank 0's.
///
/// A fused weight has `parts`, one after another, and each is split so: a rank has its rows of the
/// first part, then those of the second.
struct ShardShape {
  std::vector<std::int64_t> sizes;
  // Where `dim` is empty, rows() is 1 and row_numel() all elements, so that the arithmetic of flat
  // buffers needs no case for it.
  std::optional<std::int64_t> dim = 0;
  std::int64_t ranks = 1;
  std::int64_t parts = 1;  ///< equal ones

  /// Whether the ranks' shards one after another are the tensor.
  bool splits_rows() const { return dim == std::int64_t{0} && parts == 1; }
  /// Rows of a part on rank 0, and on `rank`; 1 without a dimension.
  std::int64_t chunk() const { return dim ? detail::ceil_div(extent(), ranks) : 1; }
  std::int64_t rows(std::int64_t rank) const;
  /// Where the rows of `rank` begin in each part.
  std::int64_t first_row(std::int64_t rank) const;
  std::vector<std::int64_t> shard_sizes(std::int64_t rank) const;
  /// Elements of a shard, and of the room that each rank's shard takes.
  std::int64_t numel(std::int64_t rank) const { return rows(rank) * row_numel(); }
  std::int64_t padded_numel() const { return chunk() * row_numel(); }

  // Views with `dim` as two dimensions, (parts, rows): of the rows that `rank` has in `unsharded`,
  // and of its `shard`. Equal sizes.
  at::Tensor rows_of(const at::Tensor& unsharded, std::int64_t rank) const {
    return by_parts(unsharded).narrow(*dim + 1, first_row(rank), rows(rank));
  }
  at::Tensor by_parts(const at::Tensor& tensor) const {
    return tensor.unflatten(*dim, {parts, tensor.size(*dim) / parts});
  }

 private:
  std::int64_t extent() const { return sizes[static_cast<std::size_t>(*dim)] / parts; }
  std::int64_t row_numel() const;
};

inline std::int64_t ShardShape::rows(std::int64_t rank) const {
  return dim ? chunk_size(extent(), ranks, rank) : 1;
}

inline std::int64_t ShardShape::first_row(std::int64_t rank) const {
  return dim ? chunk_offset(extent(), ranks, rank) : 0;
}

inline std::vector<std::int64_t> ShardShape::shard_sizes(std::int64_t rank) const {
  std::vector<std::int64_t> shard = sizes;
  if (dim) {
    shard[static_cast<std::size_t>(*dim)] = parts * rows(rank);
  }
  return shard;
}

/// Elements of one row of every part; all of the tensor's without a dimension.
inline std::int64_t ShardShape::row_numel() const {
  std::int64_t numel = parts;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    numel *= dim && i == static_cast<std::size_t>(*dim) ? 1 : sizes[i];
  }
  return numel;
}

/// The memory in which shards and their gradients live.
struct ShardHome {
  c10::Device device;
  bool pinned = false;     ///< page-locked
  bool offloaded = false;  ///< on the host for an offload_policy: the host adds up gradients
};

/// Tensors in one buffer begin at multiples of this many bytes: collectives and kernels move as
/// many at once, or a part of them.
inline constexpr std::int64_t kTensorAlignment = 64;

/// The place of a parameter's shard in a flat buffer of shards.
struct Segment {
  ShardShape shape;
  std::int64_t offset = 0;  ///< in elements
  std::int64_t gap = 0;     ///< elements between its end and the next segment, or the buffer's end
};

/// The places of shards of these shapes, one after another. Each begins at a multiple of
/// kTensorAlignment in a buffer of `dtype`, and so does each rank's part of a gathered buffer.
std::vector<Segment> segments_of(const std::vector<ShardShape>& shapes, c10::ScalarType dtype);

/// Elements of a flat buffer that holds these segments one after another.
std::int64_t flat_numel(const std::vector<Segment>& segments);

/// Clears the gaps of `buffer` (..., flat numel): they are sent with the segments, and must be the
/// same on every run.
void clear_gaps(const at::Tensor& buffer, const std::vector<Segment>& segments);

/// Rank `rank`'s shard in a flat buffer of its shards.
at::Tensor shard_of(const at::Tensor& flat, const Segment& segment, std::int64_t rank);

/// How the shards and the unsharded tensors of a group are laid out: sizes, types and devices. It
/// holds no tensor and communicates nothing; the same on every rank.
///
/// The shards are one after another in one flat buffer, each padded to rank 0's size and aligned,
/// so that with equal types the buffer itself is what an all-gather sends.
class FlatBufferLayout {
 public:
  /// `shapes`: of the parameters, at least one, all split over the same ranks; `dtype`: theirs.
  /// `device`: where this rank computes.
  FlatBufferLayout(const std::vector<ShardShape>& shapes, c10::ScalarType dtype,
                   const MixedPrecisionPolicy& policy, const ShardHome& home, c10::Device device);

  const std::vector<Segment>& segments() const { return segments_; }
  /// The types of shards, of all-gathers and computation, and of the reduction of gradients.
  c10::ScalarType dtype() const { return dtype_; }
  c10::ScalarType compute_dtype() const { return compute_dtype_; }
  c10::ScalarType reduce_dtype() const { return reduce_dtype_; }
  const ShardHome& home() const { return home_; }
  c10::Device device() const { return device_; }
  /// How many ranks hold shards.
  std::int64_t ranks() const { return segments_.front().shape.ranks; }

  /// Whether the unsharded tensors are the shards: nothing is gathered, cast or moved.
  bool shares_memory() const {
    return ranks() == 1 && compute_dtype_ == dtype_ && home_.device == device_;
  }
  /// Whether the shards have a flat buffer; without, each stays where it is.
  bool has_flat() const { return ranks() > 1 || home_.pinned; }
  /// Whether every parameter is split by rows, so that its ranks' shards one after another are its
  /// values, with padding behind them.
  bool splits_rows() const;

 private:
  c10::ScalarType dtype_;
  c10::ScalarType compute_dtype_;
  c10::ScalarType reduce_dtype_;
  std::vector<Segment> segments_;
  ShardHome home_;
  c10::Device device_;
};

/// Puts the shards of all ranks together: `gathered` (ranks, flat numel) -> `unsharded`, a
/// contiguous tensor of segment.shape.sizes for each segment. Types may differ.
void unpack(const at::Tensor& gathered, const std::vector<Segment>& segments,
            const std::vector<at::Tensor>& unsharded);

/// The inverse, into `buffer` (ranks, flat numel), casting to its type. Padding, gaps, and segments
/// whose tensor is undefined, become zeros. `unsharded` may have any strides.
void pack(const std::vector<at::Tensor>& unsharded, const std::vector<Segment>& segments,
          const at::Tensor& buffer);

/// Memory under tensors that outlive it: it can be freed and allocated again while parameters, and
/// what autograd saved of them, keep pointing to it. Contents are lost in between; version counters
/// do not move, so autograd accepts the tensors again once they are refilled. FSDP2's
/// "storage resize".
class ReusableStorage {
 public:
  ReusableStorage() = default;
  /// A storage of `bytes`, not allocated yet.
  ReusableStorage(std::int64_t bytes, c10::Device device);

  std::int64_t bytes() const { return bytes_; }
  bool allocated() const { return storage_ && storage_.nbytes() > 0; }
  /// From the device's allocator.
  void allocate();
  /// `memory`, at least as many bytes, which this keeps until free().
  void lend(at::Tensor memory);
  void free();

  /// A contiguous tensor over this storage from `byte_offset` on.
  at::Tensor tensor(std::vector<std::int64_t> sizes, c10::ScalarType dtype,
                    std::int64_t byte_offset) const;

 private:
  void set(at::DataPtr memory);

  c10::Storage storage_;
  std::int64_t bytes_ = 0;
};

/// Memory for communication: a buffer that one unit releases serves the next. Little memory is
/// idle: what does not fit the next request is freed before more is allocated.
class BufferPool {
 public:
  struct Buffer {
    at::Tensor tensor;  ///< of the requested size
    at::Tensor bytes;   ///< all of it
    comm::Lane lane;    ///< in which it was allocated
  };

  BufferPool(comm::StreamsPtr streams, c10::Device device)
      : streams_(std::move(streams)), device_(device) {}

  /// `numel` elements, not initialised, for use in `lane`, which waits for
  /// the buffer's last user. To be called where `lane` is current.
  Buffer acquire(std::int64_t numel, c10::ScalarType dtype, comm::Lane lane);
  /// Takes a buffer back that is in use until `event`.
  void release(Buffer buffer, comm::StreamEventPtr event);
  /// Frees a lane's idle memory; the lane waits for its last users.
  void drop(comm::Lane lane);
  /// Frees all that is idle.
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

/// The unsharded tensors of a group, in one storage that is allocated and freed repeatedly.
class UnshardedTensors {
 public:
  UnshardedTensors() = default;
  /// For the tensors that are sharded as `segments`, not allocated. `padded`: each has room for all
  /// ranks' padded shards (split on dimension 0), so that an all-gather can write into it. The
  /// storage can be cut into `pieces` equal ones.
  UnshardedTensors(const std::vector<Segment>& segments, c10::ScalarType dtype, c10::Device device,
                   bool padded, std::int64_t pieces);

  bool allocated() const { return storage_.allocated(); }
  std::int64_t bytes() const { return storage_.bytes(); }
  void allocate() { storage_.allocate(); }
  /// Uses `memory`, at least as many bytes, instead of allocating.
  void lend(at::Tensor memory) { storage_.lend(std::move(memory)); }
  void free() { storage_.free(); }

  /// All of the storage.
  const at::Tensor& flat() const { return flat_; }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  /// If padded: each tensor with the padding behind it, flat.
  const std::vector<at::Tensor>& padded() const { return padded_; }

 private:
  ReusableStorage storage_;
  at::Tensor flat_;
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> padded_;
};

/// A second, larger shard of gathered memory that a few ranks side by side keep while the memory is
/// freed, so that it is gathered again among them alone (ZeRO++'s hpZ). It knows nothing of
/// parameters: the memory is cut into equal pieces.
class PostForwardShard {
 public:
  /// `size`: Options::post_forward_mesh_size.
  PostForwardShard(const DataMesh& mesh, std::int64_t size);

  bool enabled() const { return static_cast<bool>(mesh_); }
  /// The number of pieces in the memory.
  std::int64_t count() const { return mesh_ ? mesh_.size() : 1; }
  bool kept() const { return piece_.defined(); }
  /// Copies this rank's piece of `memory`, whose length count() divides, in the compute lane.
  void keep(const at::Tensor& memory, comm::Streams& streams);
  /// Starts to put the pieces together in `memory`, for the unit that messages call `label`, in
  /// `lane`, which waits for the copy. Collective over the mesh.
  comm::WorkPtr start_gather(const at::Tensor& memory, const std::string& label,
                             comm::Streams& streams, comm::Lane lane);
  /// The gather has ended, and the lane that owns the freed memory has waited for it.
  void end_gather() { sent_.reset(); }
  void drop() { piece_.reset(); }
  /// The mesh's group. Made at the first use: collective over it.
  comm::Communicator& group() { return mesh_.group(); }

 private:
  DeviceMesh mesh_;  ///< one dimension; empty: nothing is kept
  at::Tensor piece_;
  comm::StreamEventPtr copied_;  ///< the piece
  at::Tensor sent_;              ///< while the collective reads it
};

}  // namespace tessera::fsdp
TESSERA_API_FOR_TEST_END
