// The fake NCCL moves the same data as NCCL, and waits like NCCL. Ranks are threads.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <numeric>
#include <thread>

#include "checks.h"

namespace fake_cuda {
namespace {

void expect_nccl(ncclResult_t result) {
  EXPECT_EQ(result, ncclSuccess) << ncclGetErrorString(result);
}

struct Rank {
  int rank;
  int ranks;
  ncclComm_t communicator;
  cudaStream_t stream;

  void synchronize() const { expect_ok(cudaStreamSynchronize(stream)); }
};

template <class Body>
void on_ranks(int ranks, Body body) {
  ncclUniqueId id;
  expect_nccl(ncclGetUniqueId(&id));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([=] {
      expect_ok(cudaSetDevice(rank));
      Rank self{rank, ranks, nullptr, new_stream()};
      expect_nccl(ncclCommInitRank(&self.communicator, ranks, id, rank));
      body(self);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

/// first, first + 1, ...
std::vector<float> counting(int first, std::size_t count) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), static_cast<float>(first));
  return values;
}

// More bytes than two ranks pass to each other at once.
constexpr std::size_t kMany = 100'000;

TEST(FakeNccl, AllGather) {
  on_ranks(3, [](const Rank& self) {
    float* const all = on_device(std::vector<float>(3 * kMany));
    float* const own = all + static_cast<std::size_t>(self.rank) * kMany;
    write(own, std::vector<float>(kMany, static_cast<float>(self.rank)));
    expect_nccl(ncclAllGather(own, all, kMany, ncclFloat32, self.communicator, self.stream));
    self.synchronize();
    const std::vector<float> gathered = values_of(all, 3 * kMany);
    for (std::size_t i = 0; i < 3 * kMany; ++i) {
      ASSERT_EQ(gathered[i], static_cast<float>(i / kMany));
    }
    expect_nccl(ncclCommDestroy(self.communicator));
  });
}

TEST(FakeNccl, ReduceScatterAndAllReduceInPlace) {
  on_ranks(3, [](const Rank& self) {
    float* const values = on_device(counting(self.rank, 6));
    float* const own = values + 2 * self.rank;
    expect_nccl(
        ncclReduceScatter(values, own, 2, ncclFloat32, ncclSum, self.communicator, self.stream));
    self.synchronize();
    const auto i = static_cast<float>(2 * self.rank);
    EXPECT_EQ(values_of(own, 2), (std::vector<float>{3 * i + 3, 3 * i + 6}));
    expect_nccl(ncclAllReduce(own, own, 1, ncclFloat32, ncclMax, self.communicator, self.stream));
    self.synchronize();
    EXPECT_EQ(value_of(own), 15);
  });
}

TEST(FakeNccl, ReducesInEachWay) {
  on_ranks(3, [](const Rank& self) {
    const auto reduced = [&](ncclRedOp_t op) {
      int* const value = on_device<int>({self.rank + 2});
      expect_nccl(ncclAllReduce(value, value, 1, ncclInt32, op, self.communicator, self.stream));
      self.synchronize();
      return value_of(value);
    };
    EXPECT_EQ(reduced(ncclSum), 9);
    EXPECT_EQ(reduced(ncclAvg), 3);
    EXPECT_EQ(reduced(ncclProd), 24);
    EXPECT_EQ(reduced(ncclMax), 4);
    EXPECT_EQ(reduced(ncclMin), 2);
  });
}

template <class T>
void expect_sum_of(ncclDataType_t type) {
  on_ranks(2, [type](const Rank& self) {
    T* const value = on_device<T>({static_cast<T>(self.rank + 1.0F)});
    expect_nccl(ncclAllReduce(value, value, 1, type, ncclSum, self.communicator, self.stream));
    self.synchronize();
    EXPECT_EQ(static_cast<float>(value_of(value)), 3.0F);
  });
}

TEST(FakeNccl, ReducesEachType) {
  expect_sum_of<std::int8_t>(ncclInt8);
  expect_sum_of<std::uint8_t>(ncclUint8);
  expect_sum_of<std::int32_t>(ncclInt32);
  expect_sum_of<std::uint32_t>(ncclUint32);
  expect_sum_of<std::int64_t>(ncclInt64);
  expect_sum_of<std::uint64_t>(ncclUint64);
  expect_sum_of<__half>(ncclFloat16);
  expect_sum_of<__nv_bfloat16>(ncclBfloat16);
  expect_sum_of<float>(ncclFloat32);
  expect_sum_of<double>(ncclFloat64);
}

TEST(FakeNccl, BroadcastAndAllToAll) {
  on_ranks(3, [](const Rank& self) {
    float* const value = on_device<float>({static_cast<float>(self.rank)});
    expect_nccl(ncclBroadcast(value, value, 1, ncclFloat32, 2, self.communicator, self.stream));
    self.synchronize();
    EXPECT_EQ(value_of(value), 2);
    float* const from = on_device(counting(10 * self.rank, 3));
    float* const to = on_device(std::vector<float>(3));
    expect_nccl(ncclAlltoAll(from, to, 1, ncclFloat32, self.communicator, self.stream));
    self.synchronize();
    const auto own = static_cast<float>(self.rank);
    EXPECT_EQ(values_of(to, 3), (std::vector<float>{own, 10 + own, 20 + own}));
  });
}

TEST(FakeNccl, GroupedSendsAndReceivesDoNotWaitForEachOther) {
  on_ranks(3, [](const Rank& self) {
    float* const from = on_device(std::vector<float>(kMany, static_cast<float>(self.rank)));
    float* const to = on_device(std::vector<float>(kMany));
    const int next = (self.rank + 1) % 3;
    const int previous = (self.rank + 2) % 3;
    expect_nccl(ncclGroupStart());
    expect_nccl(ncclSend(from, kMany, ncclFloat32, next, self.communicator, self.stream));
    expect_nccl(ncclRecv(to, kMany, ncclFloat32, previous, self.communicator, self.stream));
    expect_nccl(ncclGroupEnd());
    self.synchronize();
    EXPECT_EQ(value_of(to + kMany - 1), static_cast<float>(previous));
  });
}

/// Two communicators of the same ranks, each with a stream.
class TwoCommunicators {
 public:
  explicit TwoCommunicators(const Rank& self) : first_(self), second_(self) {
    expect_nccl(ncclCommSplit(self.communicator, 0, self.rank, &second_.communicator, nullptr));
    second_.stream = new_stream();
  }

  /// Makes the calls of both communicators, in another order on rank 1.
  template <class Call>
  void in_any_order(const Call& call) const {
    const bool reversed = first_.rank == 1;
    call(reversed ? second_ : first_);
    call(reversed ? first_ : second_);
  }

  /// Waits for the streams instead of the device, on which the other rank may have begun operations
  /// that wait for this rank.
  void synchronize() const {
    first_.synchronize();
    second_.synchronize();
  }

 private:
  Rank first_;
  Rank second_;
};

TEST(FakeNccl, TwoStreamsMayIssueInAnyOrder) {
  on_ranks(2, [](const Rank& self) {
    const TwoCommunicators both(self);
    float* const sums = on_device(std::vector<float>(2, 1));
    const auto reduce = [&](const Rank& rank) {
      float* const sum = sums + (rank.stream == self.stream ? 0 : 1);
      expect_nccl(ncclAllReduce(sum, sum, 1, ncclFloat32, ncclSum, rank.communicator, rank.stream));
    };
    both.in_any_order(reduce);
    both.synchronize();
    expect_nccl(ncclGroupStart());
    both.in_any_order(reduce);
    expect_nccl(ncclGroupEnd());
    both.synchronize();
    EXPECT_EQ(values_of(sums, 2), (std::vector<float>{4, 4}));
  });
}

TEST(FakeNccl, SplitsByColorAndKey) {
  on_ranks(4, [](const Rank& self) {
    ncclComm_t half = nullptr;
    expect_nccl(ncclCommSplit(self.communicator, self.rank % 2, -self.rank, &half, nullptr));
    int rank = -1;
    int count = 0;
    expect_nccl(ncclCommUserRank(half, &rank));
    expect_nccl(ncclCommCount(half, &count));
    EXPECT_EQ(count, 2);
    EXPECT_EQ(rank, self.rank < 2 ? 1 : 0);
    int* const sum = on_device<int>({self.rank});
    expect_nccl(ncclAllReduce(sum, sum, 1, ncclInt32, ncclSum, half, self.stream));
    self.synchronize();
    EXPECT_EQ(value_of(sum), self.rank % 2 == 0 ? 2 : 4);
  });
}

TEST(FakeNccl, RankOutsideOfASplitGetsNoneAndAnEndedCommunicatorIsRefused) {
  on_ranks(2, [](const Rank& self) {
    ncclComm_t alone = nullptr;
    const int color = self.rank == 0 ? 5 : NCCL_SPLIT_NOCOLOR;
    expect_nccl(ncclCommSplit(self.communicator, color, 0, &alone, nullptr));
    EXPECT_EQ(alone != nullptr, self.rank == 0);
    expect_nccl(ncclCommFinalize(self.communicator));
    expect_nccl(ncclCommDestroy(self.communicator));
    EXPECT_EQ(ncclCommDestroy(self.communicator), ncclInvalidArgument);
  });
}

/// A sum of `count` integers that never ends holds the stream, not the host.
void expect_no_end(const Rank& self, std::size_t count) {
  int* const values = on_device<int>({1, 1, 1, 1});
  expect_nccl(
      ncclAllReduce(values, values, count, ncclInt32, ncclSum, self.communicator, self.stream));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(cudaStreamQuery(self.stream), cudaErrorNotReady);
  expect_nccl(ncclCommAbort(self.communicator));
  self.synchronize();
}

TEST(FakeNccl, CollectivesOfAMissingPeerOrThatDoNotMatchNeverEnd) {
  on_ranks(2, [](const Rank& self) {
    if (self.rank == 0) {
      expect_no_end(self, 1);
    }
  });
  on_ranks(2, [](const Rank& self) { expect_no_end(self, self.rank == 0 ? 1 : 2); });
}

}  // namespace
}  // namespace fake_cuda
