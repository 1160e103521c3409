// Tests the purpose texts of collective calls, and calls that send several tensors: in place, or
// through a buffer if the back end cannot.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <thread>

#include "group_of_all.h"
#include "tessera/comm/detail/scopes.h"

namespace tessera::comm {
namespace {

using testing::ErrorsOfRanks;

class TensorGroups : public OnBackend {};

// Tensor sizes in elements. A tensor of 700000 elements needs several rounds of shared memory.
const std::vector<std::int64_t> kCounts{3, 0, 1, 64, 700000};

TEST_P(TensorGroups, GatherEachTensor) {
  run([](Rank& rank) {
    std::vector<at::Tensor> inputs, outputs;
    for (const std::int64_t count : kCounts) {
      inputs.push_back(numbers_from(rank.rank(), count));
      outputs.push_back(at::zeros({rank.size() * count}));
    }
    group_of_all(*rank.world())->all_gather_group(outputs, inputs)->wait();
    for (std::size_t i = 0; i < kCounts.size(); ++i) {
      std::vector<at::Tensor> expected;
      for (int r = 0; r < rank.size(); ++r) {
        expected.push_back(numbers_from(r, kCounts[i]));
      }
      EXPECT_TRUE(outputs[i].equal(at::cat(expected))) << i;
    }
  });
}

TEST_P(TensorGroups, ReduceAndScatterEachTensor) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    run([&](Rank& rank) {
      std::vector<at::Tensor> inputs, outputs;
      for (const std::int64_t count : kCounts) {
        inputs.push_back(numbers_from(0, rank.size() * count).remainder(16).to(type));
        outputs.push_back(at::zeros({count}, type));
      }
      group_of_all(*rank.world())->reduce_scatter_group(outputs, inputs, ReduceOp::kSum)->wait();
      for (std::size_t i = 0; i < kCounts.size(); ++i) {
        const at::Tensor part = inputs[i].narrow(0, rank.rank() * kCounts[i], kCounts[i]);
        EXPECT_TRUE(outputs[i].equal(part.mul(rank.size()))) << i;
      }
    });
  }
}

TEST_P(TensorGroups, CountAsOneCollective) {
  run([](Rank& rank) {
    const TrafficTable before = rank.world()->traffic().table();
    const std::vector<at::Tensor> inputs{numbers_from(0, 3), numbers_from(1, 5)};
    const std::vector<at::Tensor> outputs{at::zeros({3 * rank.size()}),
                                          at::zeros({5 * rank.size()})};
    group_of_all(*rank.world())->all_gather_group(outputs, inputs)->wait();
    const Traffic traffic = total(rank.world()->traffic().since(before));
    EXPECT_EQ(traffic.calls, 1);
    EXPECT_EQ(traffic.bytes, 4 * (3 + 5));
  });
}

TEST_P(TensorGroups, RefuseWrongCountsSizesAndTypes) {
  run([](Rank& rank) {
    Communicator& group = *group_of_all(*rank.world());
    const at::Tensor three = numbers_from(0, 3), output = at::zeros({3 * rank.size()});
    const auto gathering = [&](std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs) {
      return [&group, outputs, inputs] { group.all_gather_group(outputs, inputs); };
    };
    testing::expect_refusals(
        {{"none", gathering({}, {}), {"0 outputs", "0 inputs"}},
         {"counts", gathering({output}, {three, three}), {"1 outputs", "2 inputs"}},
         {"sizes", gathering({output, output}, {three, numbers_from(0, 4)}), {"elements"}},
         {"types",
          gathering({output, output.to(at::kLong)}, {three, three.to(at::kLong)}),
          {"Float and Long"}}});
    group.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, TensorGroups,
                         ::testing::Values(BackendCase{"shm", "aa"}, BackendCase{"shm", "aaaa"},
                                           BackendCase{"gloo", "aaa"}, BackendCase{"gloo", "abba"}),
                         [](const auto& info) { return info.param.name(); });

TEST(SimulatedWorld, GathersAndReducesTensorGroups) {
  const WorldPtr world = fake_world(1, 3);
  Communicator& group = *world->group({0, 1, 2}, "all");
  EXPECT_TRUE(group.moves_groups_in_place());
  const std::vector<at::Tensor> outputs{at::zeros({6}), at::zeros({3})};
  group.all_gather_group(outputs, {numbers_from(1, 2), numbers_from(2, 1)})->wait();
  EXPECT_TRUE(
      outputs[0].equal(at::cat({numbers_from(1, 2), numbers_from(1, 2), numbers_from(1, 2)})));
  EXPECT_TRUE(outputs[1].equal(at::full({3}, 2000.0f)));
  EXPECT_EQ(world->traffic().table().at({"all", "all_gather"}).bytes, 12);
  const at::Tensor part = at::empty({2});
  group.reduce_scatter(part, at::arange(6, at::kFloat), ReduceOp::kSum)->wait();
  EXPECT_EQ(part[0].item<float>(), 2.0F);
}

TEST_ON_RANKS(HostGroup, WorksOnAnotherThreadAndCountsNoTraffic, 2) {
  const CommunicatorPtr group = group_of_all(*rank.world());
  const CommunicatorPtr hosts = rank.world()->host_group({0, 1}, "all");
  EXPECT_NE(hosts, group);
  EXPECT_EQ(hosts, rank.world()->host_group({0, 1}, "all"));
  const auto sum_often = [](Communicator& of, int times) {
    const at::Tensor sum = at::full({1}, 1.0);
    for (int i = 0; i < times; ++i) {
      of.all_reduce(sum, ReduceOp::kSum)->wait();
    }
    EXPECT_EQ(sum.item<double>(), std::pow(2.0, times));
  };
  std::thread beside([&] { sum_often(*hosts, 90); });
  sum_often(*group, 60);
  beside.join();
  EXPECT_EQ(total(rank.world()->traffic().table()).calls, 60);
  EXPECT_ERROR(rank.world()->host_group({1 - rank.rank()}, "other"), "is not a member");
}

// With shared memory, ranks always compare the purpose texts and sizes of their collective calls;
// with Gloo, only if TESSERA_DEBUG=1. Gloo itself ends the process if the sizes differ.
TEST(Purpose, IsComparedBetweenRanks) {
  const testing::DebugChecks checks("1");
  for (const bool shared : {true, false}) {
    const testing::SharedMemory shared_memory(shared);
    const auto errors_of = [&](const std::string& purpose_of_1, std::int64_t elements_of_1) {
      return ErrorsOfRanks(3, [&](Rank& rank) {
        Communicator& group = *group_of_all(*rank.world());
        EXPECT_EQ(group.name(), shared ? "shm" : "gloo");
        const bool differs = rank.rank() == 1;
        const PurposeScope purpose(group, differs ? purpose_of_1 : "unit 'a'");
        group.all_reduce(at::zeros({differs ? elements_of_1 : 7}), ReduceOp::kSum)->wait();
      });
    };
    for (const std::string& error : errors_of("unit 'b'", 7)) {
      EXPECT_CONTAINS(error, "all_reduce for unit 'a'", "all_reduce for unit 'b'");
    }
    for (const std::string& error : errors_of("unit 'a'", 9)) {
      EXPECT_CONTAINS(error, "all_reduce for unit 'a'", shared ? "9 elements" : "36 bytes of Float",
                      shared ? "7 elements" : "28 bytes of Float");
    }
  }
}

TEST_ON_RANKS(Purpose, EndsWithItsScope, 2) {
  Communicator& group = *group_of_all(*rank.world());
  { const PurposeScope purpose(group, rank.rank() == 0 ? "this" : "that"); }
  const at::Tensor sum = at::full({1}, 1.0);
  group.all_reduce(sum, ReduceOp::kSum)->wait();
  EXPECT_EQ(sum.item<double>(), 2.0);
}

}  // namespace
}  // namespace tessera::comm
