#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "comm/data_mesh.h"
#include "memory/reusable_storage.h"
#include "parameter_group/flat_buffer_layout.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/streams.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::fsdp {

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
