#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/core/layout_math.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::detail {

/// A shard of a tensor and the ranks that hold a copy of it. Ranks are positions in a mesh.
struct ShardHolders {
  std::vector<Box> boxes;
  std::vector<int> ranks;
};

/// The shards, without empty ones, of a tensor of global `sizes` with `layout`, which must not be
/// partial, on `mesh`. They are disjoint. Not collective.
std::vector<ShardHolders> shard_holders(const DeviceMesh& mesh, LayoutPtr layout,
                                        c10::IntArrayRef sizes);

/// Brings a tensor from one distribution over the ranks of a mesh to another, in one all-to-all.
/// Every rank computes the same exchange without communication. A rank that holds what it needs
/// copies it; the holders of a shard share the work of sending it.
class BoxExchange {
 public:
  /// `shards` are disjoint and make up the tensor; rank r is to hold `wanted[r]`.
  BoxExchange(std::vector<ShardHolders> shards, std::vector<std::vector<Box>> wanted)
      : shards_(std::move(shards)), wanted_(std::move(wanted)) {}

  /// Whether any rank has to send anything.
  bool moves() const;
  /// This rank's new local tensor, of local `sizes`, from its present one. Collective over all of
  /// `mesh` if moves(). Below autograd.
  at::Tensor run(const at::Tensor& local, c10::IntArrayRef sizes, const DeviceMesh& mesh) const;

 private:
  /// A block that goes from one rank to another: its offset in both local tensors, and its sizes.
  struct Block {
    std::vector<std::int64_t> from, to, sizes;
  };
  std::vector<Block> blocks(int sender, int receiver) const;
  /// Likewise, but none from a rank to itself.
  std::vector<Block> sent_blocks(int sender, int receiver) const;
  static int sender_of(const ShardHolders& shard, int receiver);
  void receive(const at::Tensor& source, const at::Tensor& result, int self,
               const DeviceMesh& mesh) const;

  std::vector<ShardHolders> shards_;
  std::vector<std::vector<Box>> wanted_;
};

}  // namespace tessera::detail
