// Exchanges that no plan of steps describes: between two arrangements of the same ranks, and from
// one rank to all (cross_mesh_redistribute.cpp makes them). Every rank intersects the boxes that
// ranks hold with those that they want, and so knows what all of them send. The cost of that grows
// with the number of shards times the square of the number of ranks.

#include "redistribute/box_exchange.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>
#include <range/v3/view/cartesian_product.hpp>
#include <range/v3/view/iota.hpp>
#include <range/v3/view/zip.hpp>

#include "rank/below_autograd.h"
#include "redistribute/redistribute_steps.h"
#include "tessera/comm/communicator.h"
#include "tessera/dtensor/detail/flush_pending_transfers.h"

namespace tessera::detail {
namespace {

/// The block of `tensor` at `offset`; a tensor without dimensions is its own block.
at::Tensor block_of(at::Tensor tensor, const std::vector<std::int64_t>& offset,
                    const std::vector<std::int64_t>& sizes) {
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    tensor = tensor.narrow(static_cast<std::int64_t>(dim), offset[dim], sizes[dim]);
  }
  return tensor;
}

}  // namespace

std::vector<ShardHolders> shard_holders(const DeviceMesh& mesh, LayoutPtr layout,
                                        c10::IntArrayRef sizes) {
  std::vector<ShardHolders> shards;
  for (int rank = 0; rank < mesh.size(); ++rank) {
    auto boxes = owned_boxes(*layout, sizes, mesh.shape().coordinate(rank));
    if (boxes.empty()) {
      continue;
    }
    // Equal boxes are how replicas of a shard are recognised: other shards are disjoint from it.
    const auto known =
        std::ranges::find_if(shards, [&](const auto& shard) { return shard.boxes == boxes; });
    if (known != shards.end()) {
      known->ranks.push_back(rank);
    } else {
      shards.push_back({std::move(boxes), {rank}});
    }
  }
  return shards;
}

/// A rank that has the shard is its own sender. The others are spread over the holders by their
/// number, which needs no agreement.
int BoxExchange::sender_of(const ShardHolders& shard, int receiver) {
  if (std::ranges::find(shard.ranks, receiver) != shard.ranks.end()) {
    return receiver;
  }
  return shard.ranks[static_cast<std::size_t>(receiver) % shard.ranks.size()];
}

/// In the same order on all ranks, that of shards_ and of the boxes: sender and receiver lay out
/// their flat buffers by it, and messages do not say where a block belongs.
std::vector<BoxExchange::Block> BoxExchange::blocks(int sender, int receiver) const {
  std::vector<Block> result;
  const auto add_overlap = [&](const Box& held, const Box& wanted) {
    Block block;
    for (const auto& [held_offset, held_size, held_local, wanted_offset, wanted_size,
                      wanted_local] :
         ranges::views::zip(held.global_offset, held.sizes, held.local_offset, wanted.global_offset,
                            wanted.sizes, wanted.local_offset)) {
      const auto begin = std::max(held_offset, wanted_offset);
      const auto end = std::min(held_offset + held_size, wanted_offset + wanted_size);
      // One dimension without an overlap is enough for none at all. A tensor without dimensions has
      // nothing to intersect: its block is its one element.
      if (begin >= end) {
        return;
      }
      block.from.push_back(held_local + begin - held_offset);
      block.to.push_back(wanted_local + begin - wanted_offset);
      block.sizes.push_back(end - begin);
    }
    result.push_back(std::move(block));
  };
  for (const auto& shard : shards_) {
    if (sender_of(shard, receiver) != sender) {
      continue;
    }
    for (const auto& [held, wanted] : ranges::views::cartesian_product(
             shard.boxes, wanted_[static_cast<std::size_t>(receiver)])) {
      add_overlap(held, wanted);
    }
  }
  return result;
}

std::vector<BoxExchange::Block> BoxExchange::sent_blocks(int sender, int receiver) const {
  return sender == receiver ? std::vector<Block>{} : blocks(sender, receiver);
}

/// Checks all pairs, not only this rank's: the result decides whether run() is collective, so it
/// must be the same on all ranks.
bool BoxExchange::moves() const {
  const auto ranks = ranges::views::iota(0, static_cast<int>(wanted_.size()));
  for (const auto& [sender, receiver] : ranges::views::cartesian_product(ranks, ranks)) {
    if (!sent_blocks(sender, receiver).empty()) {
      return true;
    }
  }
  return false;
}

at::Tensor BoxExchange::run(const at::Tensor& local, c10::IntArrayRef sizes,
                            const DeviceMesh& mesh) const {
  BelowAutograd guard;
  auto result = at::empty(sizes, local.options());
  if (local.is_meta()) {
    return result;
  }
  const auto self = static_cast<int>(mesh.shape().index(mesh.coordinate()));
  // A communicator reads memory, where a lazy conjugation or negation has not happened.
  const auto source = local.resolve_conj().resolve_neg();
  for (const auto& own : blocks(self, self)) {
    block_of(result, own.to, own.sizes).copy_(block_of(source, own.from, own.sizes));
  }
  if (moves()) {
    receive(source, result, self, mesh);
  }
  return result;
}

/// Sends this rank's blocks, flattened one after another, and copies those that it gets to
/// `result`.
void BoxExchange::receive(const at::Tensor& source, const at::Tensor& result, int self,
                          const DeviceMesh& mesh) const {
  // Counts are of numbers as the communicator sees them: a complex element is two.
  const std::int64_t reals_each = source.is_complex() ? 2 : 1;
  // With an empty piece in front: at::cat needs at least one, also on a rank that sends nothing.
  std::vector<at::Tensor> sent{at::empty({0}, source.options())};
  std::vector<std::int64_t> send_counts, receive_counts;
  for (int rank = 0; rank < mesh.size(); ++rank) {
    std::int64_t sends = 0, receives = 0;
    for (const auto& block : sent_blocks(self, rank)) {
      sent.push_back(block_of(source, block.from, block.sizes).reshape({-1}));
      sends += sent.back().numel();
    }
    for (const auto& block : sent_blocks(rank, self)) {
      receives += c10::multiply_integers(block.sizes);
    }
    send_counts.push_back(sends * reals_each);
    receive_counts.push_back(receives * reals_each);
  }
  const auto input = at::cat(sent);
  const auto total = std::accumulate(receive_counts.begin(), receive_counts.end(), std::int64_t{0});
  // Waited for at once, so behind the transfers that this rank has under way.
  const auto output = at::empty({total / reals_each}, source.options());
  flush_pending_transfers(mesh.group_of_all_ranks())
      .all_to_all(reals(output), reals(input), receive_counts, send_counts)
      ->wait();
  // The walk of the senders once more: offsets here are where they packed.
  std::int64_t offset = 0;
  for (int rank = 0; rank < mesh.size(); ++rank) {
    for (const auto& block : sent_blocks(rank, self)) {
      const auto numel = c10::multiply_integers(block.sizes);
      block_of(result, block.to, block.sizes)
          .copy_(output.narrow(0, offset, numel).view(block.sizes));
      offset += numel;
    }
  }
}

}  // namespace tessera::detail
