// Compares the planned traffic, memory and time of a training step of a small model with real ones.

#include "tessera/planning/plan.h"
#include "tessera/observe/detail/memory.h"

#include <cstdlib>
#include <fstream>
#include <map>

#include "planning/net.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/comm/trace.h"
#include "tessera/observe/metrics.h"
#include "tessera/optim/adamw.h"
#include "tessera/planning/report.h"
#include "testing/distributed.h"
#include "testing/files.h"
#include "testing/models.h"
#include "testing/module_values.h"
#include "testing/processes.h"

namespace tessera {
namespace {

using testing::make_net;
using testing::Net;
using testing::products_alone;
using testing::train_net;

const MeshShape& two_by_two() {
  static const MeshShape shape({2, 2}, {"dp", "tp"});
  return shape;
}

planning::RunPlan plan_net(const planning::PlanOptions& options = {}) {
  return planning::plan(make_net, train_net, two_by_two(), options);
}

/// Runs a real step, calls `second`, and runs another real step. Returns that step's traffic.
template <class Make, class Train>
comm::TrafficTable second_step(
    const comm::WorldPtr& world, const Make& make, const Train& train,
    const std::function<void()>& second = [] {}) {
  const DeviceMesh mesh = init_device_mesh(world, two_by_two().sizes(), two_by_two().names());
  const auto model = make(mesh);
  nn::to_empty(*model, at::kCPU);
  nn::init_weights(*model, /*seed=*/0);
  optim::AdamW optimizer(*model, optim::AdamWOptions{});
  train(*model, optimizer, mesh);
  second();
  const comm::TrafficTable before = world->traffic().table();
  train(*model, optimizer, mesh);
  return world->traffic().since(before);
}

using CallsAndBytes =
    std::map<std::pair<std::string, std::string>, std::pair<std::int64_t, std::int64_t>>;

CallsAndBytes calls_and_bytes(const comm::TrafficTable& table) {
  CallsAndBytes sent;
  for (const auto& [key, traffic] : table) {
    sent[key] = {traffic.calls, traffic.bytes};
  }
  return sent;
}

template <class Make, class Train>
void expect_sends_as_planned(const Make& make, const Train& train) {
  const planning::RunPlan plan = planning::plan(make, train, two_by_two());
  RunRanks(4, [&](Rank& rank) {
    const CallsAndBytes sent = calls_and_bytes(second_step(rank.world(), make, train));
    EXPECT_EQ(sent.count({"dp", "all_gather"}), 1U);
    EXPECT_EQ(sent.count({"tp", "all_reduce"}), 1U);
    for (const planning::RankPlan& planned : plan.ranks) {
      if (planned.kind.first == rank.rank()) {
        EXPECT_EQ(calls_and_bytes(planned.metrics.comm), sent);
      }
    }
  });
}

TEST(Plan, PredictsTrafficOfEachRank) {
  expect_sends_as_planned(make_net, train_net);
}

TEST(Plan, PredictsTrafficOfAnAdoptedEncoder) {
  using Encoder = nn::Adopted<torch::nn::TransformerEncoderImpl>;
  const auto make = [](const DeviceMesh& mesh) {
    auto encoder = [] {
      const nn::MetaDevice meta;
      return nn::adopt(testing::torch_encoder());
    }();
    using tensor_parallel::colwise_parallel, tensor_parallel::rowwise_parallel;
    tensor_parallel::parallelize_module(
        *encoder, mesh["tp"],
        {{"layers.*.linear1", colwise_parallel()}, {"layers.*.linear2", rowwise_parallel()}});
    fsdp::fully_shard(*encoder, mesh["dp"]);
    return encoder;
  };
  const auto train = [](Encoder& encoder, optim::Optimizer& optimizer, const DeviceMesh&) {
    encoder(at::full({3, 4, 8}, 0.1)).square().mean().backward();
    optim::clip_grad_norm_(optimizer.parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
  };
  expect_sends_as_planned(make, train);
}

/// Tensor memory is counted per process, so each of the four ranks is a process.
TEST(DISABLED_Plan, PeakOfARank) {
  const comm::WorldPtr world = comm::world_from_environment();
  observe::count_tensor_memory();
  second_step(world, make_net, train_net,
              [] { static_cast<void>(observe::take_peak_tensor_bytes()); });
  std::ofstream(std::string(std::getenv("TEST_DIR")) + "/" + std::to_string(world->rank()))
      << observe::take_peak_tensor_bytes().value();
}

TEST(Plan, PredictsPeakMemoryOfEachRankKind) {
  const testing::TemporaryFolder dir;
  for (const testing::Ended& ended : testing::RunProcesses(
           4, "DISABLED_Plan.PeakOfARank", {.environment = {{"TEST_DIR", dir.path().string()}}})) {
    ASSERT_EQ(ended.exit_code, 0) << ended.output;
  }
  std::int64_t ranks = 0;
  const planning::RunPlan plan = plan_net();
  for (const planning::RankPlan& planned : plan.ranks) {
    ranks += planned.kind.count;
    double measured = 0;
    std::ifstream(dir.path() / std::to_string(planned.kind.first)) >> measured;
    EXPECT_LT(std::abs(static_cast<double>(planned.memory.peak_bytes) / measured - 1), 0.05)
        << planned.memory.peak_bytes << " planned, " << measured << " measured";
  }
  EXPECT_EQ(ranks, 4);
  // The ranks have 84, 83, 83 and 83 of the 333 columns.
  EXPECT_GE(plan.ranks.size(), 3U);
}

TEST(Plan, GroupsRanksByPositionInAFlattenedDimension) {
  const auto make = [](const DeviceMesh& mesh) {
    const auto linear = testing::made_on_meta<nn::Linear>(3, 7, nn::LinearOptions{.bias = false});
    fsdp::fully_shard(*linear, mesh[{"a", "b"}].flatten());
    return linear;
  };
  const auto step = [](nn::Linear& linear, optim::Optimizer& optimizer, const DeviceMesh&) {
    linear(at::randn({2, 3})).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  // 7 rows are split unevenly over 6 ranks: 2, 2, 2, 1, 0 and 0 rows.
  const planning::RunPlan plan = planning::plan(make, step, MeshShape({2, 3, 2}, {"a", "b", "c"}));
  std::vector<std::pair<int, std::int64_t>> kinds;
  for (const planning::RankPlan& planned : plan.ranks) {
    kinds.emplace_back(planned.kind.first, planned.kind.count);
  }
  EXPECT_EQ(kinds, (std::vector<std::pair<int, std::int64_t>>{{0, 6}, {6, 2}, {8, 4}}));
}

TEST(Plan, DoesNotCountCopiesOfFakeCollectives) {
  int copies = 0;
  const kernels::FakeMode fake(c10::DeviceType::CPU, [&](const kernels::FakeCall& call) {
    copies += static_cast<int>(call.name == "aten::copy_");
  });
  const comm::WorldPtr world = comm::fake_world(/*rank=*/1, /*size=*/3);
  const DeviceMesh mesh = init_device_mesh(world, {3}, {"dp"});
  comm::Communicator& group = mesh.group();
  const at::Tensor three = at::empty({3}), one = at::empty({1});
  group.all_gather(three, one)->wait();
  group.reduce_scatter(one, three, ReduceOp::kSum)->wait();
  const std::vector<std::int64_t> counts{1, 1, 1};
  group.all_to_all(three, at::empty({3}), counts, counts)->wait();
  EXPECT_EQ(copies, 0);
  // In plans, all_gather copies only integer tensors, because plans compute no other values.
  const at::Tensor numbers = at::zeros({3}, at::kLong);
  group.all_gather(numbers, at::full({1}, 7, at::kLong))->wait();
  EXPECT_EQ(numbers.sum().item<std::int64_t>(), 21);
}

TEST(Plan, CountsFlopsOfProducts) {
  const planning::RunPlan plan =
      planning::plan(make_net, train_net, MeshShape({1, 1}, {"dp", "tp"}),
                     {.machine = products_alone(), .tokens = testing::kSamples});
  const double features = Net::kChannels * Net::kSize * Net::kSize;
  const double linear = 2.0 * testing::kSamples * Net::kHidden * (features + 3);
  const double convolution = 2.0 * testing::kSamples * features * 3 * 3 * 3;
  // Products per layer: one in forward, two in backward (one if the layer is a convolution).
  const double flops = 3 * linear + 2 * convolution;
  ASSERT_TRUE(plan.ranks.front().time);
  EXPECT_NEAR(plan.ranks.front().time->flops, flops, 1e-6 * flops);
  EXPECT_NEAR(plan.ranks.front().metrics.step_time_s, flops / 1e9, 1e-6 * flops / 1e9);
  EXPECT_NEAR(*plan.ranks.front().metrics.mfu, 100, 1e-3);
}

/// The FLOP rate depends on the dtype of the inputs (bf16), not on the dtype of the result (fp32).
TEST(Plan, UsesTheFlopRateOfFactorDtypes) {
  const auto step = [](Net&, optim::Optimizer&, const DeviceMesh&) {
    const at::Tensor a = at::empty({8, 4}, at::kBFloat16), b = at::empty({4, 16}, at::kBFloat16);
    at::Tensor sum = at::empty({8, 16});
    at::mm_out(sum, a, b, at::kFloat);
    at::addmm_out(sum, sum, a, b, at::kFloat);
  };
  planning::Machine machine = products_alone();
  machine.flops_half = 4e9;
  const planning::RunPlan plan = planning::plan(make_net, step, MeshShape({1, 1}, {"dp", "tp"}),
                                                {.machine = machine, .device = "cuda"});
  const planning::StepTime& time = *plan.ranks.front().time;
  EXPECT_EQ(time.flops, 2 * 2.0 * 8 * 16 * 4);
  EXPECT_NEAR(time.compute, time.flops / 4e9, 1e-9 * time.compute);
}

TEST(Plan, CountsMemoryTrafficOfOperators) {
  constexpr std::int64_t kRows = 40, kColumns = 30;
  const auto step = [](Net&, optim::Optimizer&, const DeviceMesh&) {
    const at::Tensor whole = at::empty({kRows, kColumns});
    at::hypot(whole, at::empty({1, kColumns}).expand({kRows, kColumns}));
    at::hypot(whole, whole);
  };
  const planning::RunPlan plan = planning::plan(make_net, step, MeshShape({1, 1}, {"dp", "tp"}),
                                                {.machine = planning::machine_of("h100")});
  const planning::OperatorUse use = plan.ranks.front().time->operators.at("aten::hypot");
  EXPECT_EQ(use.calls, 2);
  // An expanded tensor repeats one row, so only the bytes of this row count.
  EXPECT_EQ(use.bytes, 4 * (5 * kRows * kColumns + kColumns));
  EXPECT_EQ(use.flops, 0);
}

TEST(Plan, ListsTimePerOperator) {
  const planning::RunPlan plan = plan_net({.machine = planning::machine_of("h100")});
  const planning::StepTime& time = *plan.largest().time;
  double seconds = 0;
  double flops = 0;
  for (const auto& [name, use] : time.operators) {
    seconds += use.seconds;
    flops += use.flops;
  }
  EXPECT_NEAR(seconds, time.compute, 1e-9 * time.compute);
  EXPECT_NEAR(flops, time.flops, 1e-9 * time.flops);
  EXPECT_CONTAINS(planning::to_json(plan), "\"name\": \"aten::addmm\"");
  EXPECT_CONTAINS(planning::to_text(plan), "Predicted, not measured. A h100: products at 76 %",
                  "measured on: one H200, libtorch 2.11");
}

TEST(Plan, ExposesAllCollectiveTimeOnCpu) {
  planning::Machine machine = products_alone();
  machine.link_bandwidth = 1e6;
  const planning::StepTime time = *plan_net({.machine = machine}).ranks.front().time;
  for (const char* group : {"dp", "tp"}) {
    EXPECT_GT(time.exposed.at(group), 0);
    EXPECT_NEAR(time.exposed.at(group), time.communication.at(group), 1e-9);
  }
}

TEST(Plan, ReportsWhetherMemorySuffices) {
  planning::Machine machine = products_alone();
  machine.reserved_bytes = 0;
  machine.memory_bytes = 1000;
  const planning::RunPlan plan = plan_net({.machine = machine});
  EXPECT_FALSE(plan.fits());
  EXPECT_CONTAINS(planning::to_text(plan), "It does not fit");
  EXPECT_CONTAINS(planning::to_text(plan), "parameters take");
  EXPECT_CONTAINS(planning::to_json(plan), "\"fits\": false");
}

TEST(Plan, RecoversAfterAFailedStep) {
  const auto fail_step = [](Net&, optim::Optimizer&, const DeviceMesh&) { fail("no data"); };
  EXPECT_ERROR(planning::plan(make_net, fail_step, two_by_two()), "no data");
  EXPECT_EQ(plan_net().mesh, two_by_two());
}

std::shared_ptr<nn::Linear> make_linear(const DeviceMesh& mesh) {
  auto linear = testing::made_on_meta<nn::Linear>(4, 4);
  fsdp::fully_shard(*linear, mesh["dp"]);
  return linear;
}

/// The two ranks train on 3 and 2 rows. The parameter shards of both ranks have equal sizes.
void train_uneven(nn::Linear& linear, optim::Optimizer& optimizer, const DeviceMesh& mesh) {
  linear(at::full({mesh.local_rank("dp") == 0 ? 3 : 2, 4}, 0.5)).square().mean().backward();
  optimizer.step();
  optimizer.zero_grad();
}

TEST(Plan, RefusesUnevenBatchesWithoutSizes) {
  const MeshShape two({2}, {"dp"});
  EXPECT_ERROR(planning::plan(make_linear, train_uneven, two), "ranks 0 and 1 ",
               "PlanOptions::sizes");
  const planning::RunPlan plan = planning::plan(
      make_linear, train_uneven, two,
      {.sizes = [](const std::vector<std::int64_t>& at) -> std::vector<std::int64_t> {
        return {at[0] == 0 ? 3 : 2};
      }});
  ASSERT_EQ(plan.ranks.size(), 2U);
  EXPECT_GT(plan.ranks[0].memory.peak_bytes, plan.ranks[1].memory.peak_bytes);
}

/// Doubles the rows whose sum is positive. Plans have no values, so they cannot count such rows.
void train_chosen_rows(nn::Linear& linear, optim::Optimizer& optimizer, const DeviceMesh&) {
  const at::Tensor x = linear(at::full({8, 4}, 0.5));
  const at::Tensor rows = x.sum(1).nonzero().squeeze(1);
  x.index_add(0, rows, x.index_select(0, rows)).square().mean().backward();
  optimizer.step();
  optimizer.zero_grad();
}

TEST(Plan, RequiresResultsOfDataDependentOperators) {
  const MeshShape one({1}, {"dp"});
  EXPECT_ERROR(planning::plan(make_linear, train_chosen_rows, one), "aten::nonzero",
               "PlanOptions::data_dependent");
  const auto plan_of = [&](std::int64_t rows) {
    return planning::plan(
        make_linear, train_chosen_rows, one,
        {.machine = planning::machine_of("h100"),
         .data_dependent = {{"aten::nonzero", [rows](const kernels::FakeCall& call) {
                               EXPECT_EQ(call.inputs[0].sizes(), at::IntArrayRef({8}));
                               return std::vector<at::Tensor>{at::arange(rows).unsqueeze(1)};
                             }}}});
  };
  const auto bytes = [](const planning::RunPlan& plan) {
    return plan.ranks[0].time->operators.at("aten::index_select").bytes;
  };
  EXPECT_GT(bytes(plan_of(6)), bytes(plan_of(2)));
}

}  // namespace
}  // namespace tessera
