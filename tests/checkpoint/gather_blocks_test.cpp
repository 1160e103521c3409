#include "checkpoint/ranks.h"

#include <numeric>

#include "checkpoint/format.h"
#include "testing/distributed.h"

namespace tessera::checkpoint {
namespace {

using Sizes = std::vector<std::int64_t>;

comm::CommunicatorPtr AllRanks(const Rank& rank) {
  std::vector<int> ranks(static_cast<std::size_t>(rank.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return rank.world()->group(ranks, "world");
}

/// 0, 1, 2, ... in `sizes`.
at::Tensor Range(const Sizes& sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat).view(sizes);
}

/// Gathers on all ranks; on rank 0 checks that each element arrives once and where it belongs.
void ExpectGathered(const Rank& rank, const at::Tensor& tensor, const at::Tensor& expected,
                    std::int64_t round_elements = 1 << 20) {
  at::Tensor found = at::full(expected.sizes(), -1, at::kFloat);
  std::int64_t elements = 0;
  const auto visit = [&](std::span<const std::int64_t> offset, const at::Tensor& block) {
    at::Tensor target = found;
    for (std::size_t dim = 0; dim < offset.size(); ++dim) {
      const auto d = static_cast<std::int64_t>(dim);
      target = target.narrow(d, offset[dim], block.size(d));
    }
    target.copy_(block);
    elements += block.numel();
  };
  gather_blocks(tensor, at::kFloat, *AllRanks(rank), at::kCPU, visit, round_elements);
  if (rank.rank() == 0) {
    EXPECT_TRUE(at::equal(found, expected));
    EXPECT_EQ(elements, expected.numel());
  } else {
    EXPECT_EQ(elements, 0);
  }
}

const std::vector<Placements> kPlacements = {{Shard{0}, Shard{0}},    {Shard{0}, Shard{1}},
                                             {Shard{1}, Shard{0}},    {Shard{1}, Shard{1}},
                                             {Shard{0}, Replicate{}}, {Replicate{}, Shard{0}},
                                             {Shard{1}, Replicate{}}, {Replicate{}, Replicate{}}};

TEST(GatherBlocks, GathersTheWholeTensorFromEveryPlacement) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    for (const auto& sizes : {Sizes{8, 4}, Sizes{7, 5}, Sizes{1, 3}, Sizes{3, 1, 2}, Sizes{0, 4}}) {
      for (const auto& placements : kPlacements) {
        const auto full = Range(sizes);
        ExpectGathered(rank, distribute_tensor(full, mesh, placements), full);
      }
    }
  });
}

TEST(GatherBlocks, WorksInBoundedRounds) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    for (const auto& placements : kPlacements) {
      for (const std::int64_t elements : {1, 40, 100}) {
        const auto full = Range({13, 5});
        ExpectGathered(rank, distribute_tensor(full, mesh, placements), full, elements);
      }
    }
  });
}

TEST(GatherBlocks, FollowsTheOrderOfFsdpOverTensorParallel) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const auto full = Range({9, 3});
    // tp splits first, dp splits what tp left.
    const auto layout = Layout::intern({2, 2}, {{Digit{0, {1, 0}}}, {}});
    const auto tensor = DistributedTensor(distribute_tensor(full, mesh, {Replicate{}, Replicate{}}))
                            .redistribute(layout);
    ExpectGathered(rank, tensor, full);
    ExpectGathered(rank, tensor, full, 1);
  });
}

TEST(GatherBlocks, TakesOneOfSeveralSubmeshes) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const auto full = Range({5, 3});
    ExpectGathered(rank, distribute_tensor(full, mesh["tp"], {Shard{0}}), full);
    ExpectGathered(rank, distribute_tensor(full, mesh["dp"], {Shard{1}}), full);
  });
}

TEST(GatherBlocks, HandsOverPlainTensorsWithoutCommunication) {
  RunRanks(2, [](Rank& rank) {
    const auto before = rank.world()->traffic().table();
    ExpectGathered(rank, Range({3, 4}), Range({3, 4}));
    ExpectGathered(rank, at::full({}, 7, at::kFloat), at::full({}, 7, at::kFloat));
    EXPECT_EQ(comm::total(rank.world()->traffic().since(before)).calls, 0);
  });
}

TEST(GatherBlocks, SendsEachElementOnceAtMost) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const auto tensor = distribute_tensor(Range({8, 4}), mesh, {Replicate{}, Shard{0}});
    const auto before = rank.world()->traffic().table();
    ExpectGathered(rank, tensor, Range({8, 4}));
    const auto sent = comm::total(rank.world()->traffic().since(before)).bytes;
    EXPECT_EQ(sent, rank.rank() < 2 ? 16 * 4 : 0);
  });
}

TEST(GatherBlocks, ConvertsTypes) {
  RunRanks(2, [](Rank& rank) {
    const auto full = Range({6}).to(at::kBFloat16);
    ExpectGathered(rank, distribute_tensor(full, rank.mesh({2}, {"dp"}), {Shard{0}}),
                   full.to(at::kFloat));
  });
}

/// Each element in one piece, in the order of the block, and no piece larger than asked for.
TEST(Pieces, CoverABlockInOrder) {
  const std::vector<std::vector<std::int64_t>> blocks = {{},     {7},       {5, 3},   {2, 11},
                                                         {0, 4}, {3, 0, 2}, {2, 3, 5}};
  for (const auto& block : blocks) {
    for (const std::int64_t most : {1, 2, 3, 4, 7, 100}) {
      const at::Tensor all = at::arange(c10::multiply_integers(block)).view(block);
      std::vector<at::Tensor> pieces = {at::empty({0}, at::kLong)};
      for_each_piece(block, most, [&](auto offset, auto sizes) {
        pieces.push_back(block_at(all, offset, sizes).reshape({-1}));
        EXPECT_LE(pieces.back().numel(), most);
        EXPECT_GT(pieces.back().numel(), 0);
      });
      EXPECT_TRUE(at::cat(pieces).equal(all.reshape({-1}))) << all.sizes() << " by " << most;
    }
  }
}

TEST(CheckGatherable, RefusesAPendingSum) {
  RunRanks(2, [](Rank& rank) {
    const auto partial =
        DistributedTensor::from_local(at::ones({2}), rank.mesh({2}, {"dp"}), {Partial{}});
    EXPECT_ERROR(check_gatherable(partial, "w"), "parameter 'w' is Partial");
  });
}

}  // namespace
}  // namespace tessera::checkpoint
