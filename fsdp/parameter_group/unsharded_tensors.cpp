// The memory that a group is gathered into. Autograd saves the tensors made here for backward, so
// they are made once and only their storage is freed and allocated again. Also the piece of that
// memory which a post-forward mesh keeps in between.

#include "parameter_group/unsharded_tensors.h"

#include "tessera/core/detail/rounding.h"
#include "tessera/core/error.h"

namespace tessera::fsdp {
namespace {

using detail::round_up;

/// The ranks that keep a larger shard after forward. Empty if the feature is off, or covers all
/// ranks and so duplicates the shards.
DeviceMesh post_forward_mesh(const DataMesh& mesh, std::int64_t size) {
  const std::int64_t ranks = mesh.shard.size();
  if (mesh.replica) {
    return mesh.replica.size() < ranks ? mesh.replica : DeviceMesh();
  }
  // Size 1 is the default and means off; all ranks would keep the shard a second time.
  if (size == 1 || size == ranks) {
    return {};
  }
  // Neighbours by rank, since they usually share a host and its fast links.
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
    // With padding an all-gather of rows writes here directly; the tensor proper is the beginning.
    numels.push_back(padded ? segment.shape.ranks * segment.shape.padded_numel()
                            : c10::multiply_integers(segment.shape.sizes));
    bytes += round_up(itemsize * numels.back(), kTensorAlignment);
  }
  // Each rank of a post-forward mesh keeps an equal piece, aligned as tensors are.
  bytes = round_up(bytes, kTensorAlignment * pieces);
  storage_ = ReusableStorage(bytes, device);
  // All tensors share this one storage, so that a post-forward mesh keeps and gathers one range.
  flat_ = storage_.tensor({bytes / itemsize}, dtype, 0);
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    tensors_.push_back(storage_.tensor(segments[i].shape.sizes, dtype, offset));
    if (padded) {
      padded_.push_back(storage_.tensor({numels[i]}, dtype, offset));
    }
    offset += round_up(itemsize * numels[i], kTensorAlignment);
  }
}

PostForwardShard::PostForwardShard(const DataMesh& mesh, std::int64_t size)
    : mesh_(post_forward_mesh(mesh, size)) {}

void PostForwardShard::keep(const at::Tensor& memory, comm::Streams& streams) {
  const std::int64_t piece = memory.numel() / count();
  piece_ = memory.narrow(0, mesh_.local_rank() * piece, piece).clone();
  copied_ = streams.record(comm::Lane::kCompute);
}

comm::WorkPtr PostForwardShard::start_gather(const at::Tensor& memory, const std::string& label,
                                             comm::Streams& streams, comm::Lane lane) {
  streams.wait(lane, copied_);
  // Held beside piece_, which drop() may reset while the collective still reads it.
  sent_ = piece_;
  const comm::PurposeScope purpose(group(), label);
  return group().all_gather(memory, sent_);
}

}  // namespace tessera::fsdp
