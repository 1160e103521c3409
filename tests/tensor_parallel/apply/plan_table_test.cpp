// A plan's table says what the plan then does: placements, sizes and bytes, and in a recorded one
// the collectives of a real step.
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/normalization.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <tuple>

#include "tessera/comm/fake_world.h"
#include "tessera/nn/child.h"
#include "tessera/nn/hooked.h"
#include "tessera/nn/meta_device.h"
#include "tessera/nn/visit_modules.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "tessera/tensor_parallel/plan_table.h"
#include "testing/distributed.h"
#include "testing/module_values.h"
#include "testing/small_llama.h"

namespace tessera::tensor_parallel {
namespace {

using testing::plan_of_small_llama;
using testing::SmallLlama;

std::shared_ptr<SmallLlama> on_meta() {
  const nn::MetaDevice meta;
  return std::make_shared<SmallLlama>();
}

DeviceMesh paper_mesh(int rank, int ranks) {
  return init_device_mesh(comm::fake_world(rank, ranks), {ranks}, {"tp"});
}

const PlanRow& row_of(const PlanTable& table, const std::string& fqn) {
  return *std::ranges::find(table.rows, fqn, &PlanRow::fqn);
}

constexpr std::int64_t kTokens = 10;

/// A forward and its backward, on any device.
void run_step(SmallLlama& model, c10::Device device) {
  const at::Tensor ids = at::arange(kTokens + 1, at::device(device).dtype(at::kLong)).remainder(13);
  cross_entropy(model(ids.slice(0, 0, kTokens)), ids.slice(0, 1)).backward();
}

/// All that a table says is sent, in the form of metrics.
comm::TrafficTable traffic_of(const PlanTable& table) {
  comm::TrafficTable sums;
  const auto add = [&sums](const std::vector<PlannedCollective>& list) {
    for (const PlannedCollective& planned : list) {
      comm::Traffic& sum = sums[{planned.group, planned.collective}];
      sum.calls += planned.traffic.calls;
      sum.bytes += planned.traffic.bytes;
    }
  };
  for (const PlanRow& row : table.rows) {
    add(row.collectives);
  }
  add(table.elsewhere);
  return sums;
}

std::vector<std::tuple<std::string, std::string, std::int64_t, std::int64_t>> rows_of(
    const comm::TrafficTable& table) {
  std::vector<std::tuple<std::string, std::string, std::int64_t, std::int64_t>> rows;
  for (const auto& [key, traffic] : table) {
    rows.emplace_back(key.first, key.second, traffic.calls, traffic.bytes);
  }
  return rows;
}

TEST(PlanTable, SaysWhatEachRankWillHold) {
  for (const int rank : {0, 2}) {
    const auto model = on_meta();
    const DeviceMesh mesh = paper_mesh(rank, 3);
    const PlanTable table = check_plan(*model, mesh, plan_of_small_llama(true));
    EXPECT_FALSE(tessera::is_distributed(model->embed->weight));  // nothing has changed
    parallelize_module(*model, mesh, plan_of_small_llama(true));
    for (const PlanRow& row : table.rows) {
      for (const PlannedParameter& parameter : row.parameters) {
        const auto slots = model->named_slots();
        const auto slot = std::ranges::find(slots, nn::join_fqn(row.fqn, parameter.name),
                                            &nn::NamedSlots::value_type::first);
        ASSERT_NE(slot, slots.end()) << row.fqn;
        const at::Tensor& tensor = slot->second->get();
        EXPECT_EQ(parameter.placement, to_string(DistributedTensor(tensor).placements()[0]));
        EXPECT_EQ(at::IntArrayRef(parameter.local_sizes), local_tensor(tensor).sizes());
        EXPECT_EQ(parameter.bytes, static_cast<std::int64_t>(local_tensor(tensor).nbytes()));
      }
    }
  }
}

// 13 rows of 8 fp32 numbers over 3 ranks: 5, 5 and 3.
TEST(PlanTable, SaysHowUnevenItIs) {
  const auto model = on_meta();
  const PlanTable table = check_plan(*model, paper_mesh(2, 3), plan_of_small_llama(true));
  const PlannedParameter& embed = row_of(table, "embed").parameters.at(0);
  EXPECT_EQ(embed.local_sizes, (std::vector<std::int64_t>{3, 8}));
  EXPECT_EQ(embed.bytes, 96);
  EXPECT_EQ(embed.smallest_bytes, 96);
  EXPECT_EQ(embed.largest_bytes, 160);
}

TEST(PlanTable, NamesUnnamedAndSharedParameters) {
  const auto model = on_meta();
  model->head->tie_slot("weight", model->embed->slot("weight"));
  const PlanTable table = check_plan(*model, paper_mesh(0, 2),
                                     {{"embed", rowwise_parallel()}, {"head", colwise_parallel()}});
  EXPECT_FALSE(row_of(table, "embed").parameters.at(0).shared);
  EXPECT_TRUE(row_of(table, "head").parameters.at(0).shared);
  EXPECT_EQ(row_of(table, "norm").style, "no entry");
  EXPECT_EQ(row_of(table, "norm").parameters.at(0).placement, "Replicate()");
}

TEST(PlanTable, RefusesWhatParallelizeModuleRefuses) {
  const auto model = on_meta();
  EXPECT_ERROR(check_plan(*model, paper_mesh(0, 2), {{"nothing", colwise_parallel()}}),
               "the pattern 'nothing' matches no module");
}

// The oracle is a real step: what its ranks count is what one simulating process records.
TEST(PlanTable, RecordsTheCollectivesOfARealStep) {
  for (const bool sequence_parallel : {true, false}) {
    for (const int ranks : {2, 3}) {
      const auto paper = on_meta();
      const PlanTable table =
          record_plan(*paper, paper_mesh(ranks - 1, ranks), plan_of_small_llama(sequence_parallel),
                      [&] { run_step(*paper, c10::kMeta); });
      RunRanks(ranks, [&](testing::Rank& rank) {
        testing::Filled<SmallLlama> model;
        parallelize_module(model, rank.mesh({ranks}, {"tp"}),
                           plan_of_small_llama(sequence_parallel));
        const comm::TrafficTable before = rank.world()->traffic().table();
        run_step(model, c10::kCPU);
        if (rank.rank() == ranks - 1) {
          EXPECT_EQ(rows_of(rank.world()->traffic().since(before)), rows_of(traffic_of(table)));
        }
      });
    }
  }
}

/// Images of 3 x 8 x 8; a convolution and a norm make features of them.
struct SmallConvolution : nn::Module<SmallConvolution> {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor features = at::relu((*norm)((*conv)(x))).flatten(1);
    return (*down)(at::relu((*up)(features))).square().mean();
  }
  nn::Child<nn::Hooked<torch::nn::Conv2d>> conv{*this, "conv", torch::nn::Conv2dOptions(3, 4, 3)};
  nn::Child<nn::Hooked<torch::nn::GroupNorm>> norm{*this, "norm",
                                                   torch::nn::GroupNormOptions(2, 4)};
  nn::Child<nn::Linear> up{*this, "up", 4 * 36, 10}, down{*this, "down", 10, 2};
};

/// A simulated step of `Model` on `input` records what two ranks count.
template <class Model>
void expect_recorded(const ParallelizePlan& plan, const at::Tensor& input) {
  const auto paper = testing::made_on_meta<Model>();
  const DeviceMesh mesh = init_device_mesh(comm::meta_world(0, 2), {2}, {"tp"});
  const PlanTable table =
      record_plan(*paper, mesh, plan, [&] { (*paper)(input.to(c10::kMeta)).backward(); });
  RunRanks(2, [&](Rank& rank) {
    testing::Filled<Model> model;
    parallelize_module(model, rank.mesh({2}, {"tp"}), plan);
    // What ranks agree on at their first step is not counted.
    const auto step = [&] { model(input).backward(); };
    step();
    const comm::TrafficTable before = rank.world()->traffic().table();
    step();
    EXPECT_EQ(rows_of(rank.world()->traffic().since(before)), rows_of(traffic_of(table)));
  });
}

TEST(PlanTable, RecordsAConvolution) {
  expect_recorded<SmallConvolution>({{"up", colwise_parallel()}, {"down", rowwise_parallel()}},
                                    at::ones({5, 3, 8, 8}));
}

/// Looks rows up and compares them by operators of libtorch.
struct SmallTable : nn::Module<SmallTable> {
  SmallTable() { table = register_slot("table", {13, 8}); }
  at::Tensor forward(const at::Tensor& ids) {
    const at::Tensor nearest = table->square().sum(1).argmin(0, /*keepdim=*/true);
    return at::embedding(*table, ids).sub(at::embedding(*table, nearest)).square().mean() +
           table->gather(0, ids.unsqueeze(1)).sum() + table->norm();
  }
  nn::Parameter table;
};

TEST(PlanTable, RecordsWhatPicksRowsOfATableThatIsSplit) {
  for (const std::int64_t dim : {0, 1}) {
    expect_recorded<SmallTable>({{"", place_parameters({.placements = {{"table", Shard{dim}}}})}},
                                at::arange(5));
  }
}

TEST(PlanTable, SaysWhichStyleCausesACollectiveAndWhy) {
  const auto model = on_meta();
  const PlanTable table = record_plan(*model, paper_mesh(0, 2), plan_of_small_llama(true),
                                      [&] { run_step(*model, c10::kMeta); });
  const auto& mixer = row_of(table, "block1.mixer").collectives;
  ASSERT_EQ(mixer.size(), 2U);
  EXPECT_EQ(mixer[0].collective, "all_gather");
  EXPECT_FALSE(mixer[0].backward);
  EXPECT_EQ(mixer[0].reason, "input [Shard(0)] -> [Replicate()]");
  EXPECT_EQ(mixer[0].traffic.bytes, kTokens / 2 * 8 * 4);
  EXPECT_EQ(mixer[1].collective, "reduce_scatter");
  EXPECT_TRUE(mixer[1].backward);
  EXPECT_EQ(mixer[1].reason, "gradient of input [Shard(0)] -> [Replicate()]");
  // Their input is gathered already, and its gradient is summed there.
  EXPECT_TRUE(row_of(table, "block1.mixer.q").collectives.empty());
  const auto sums = std::ranges::find(
      table.elsewhere, "sum of the gradients of replicated parameters", &PlannedCollective::reason);
  ASSERT_NE(sums, table.elsewhere.end());
  EXPECT_EQ(sums->traffic.calls, 1);
}

TEST(PlanTable, NamesTheCollectivesOfALossAfterItsOperator) {
  const auto model = on_meta();
  const PlanTable table =
      record_plan(*model, paper_mesh(0, 2), {{"head", colwise_parallel()}}, [&] {
        const StrictScope strict;
        run_step(*model, c10::kMeta);
      });
  const auto loss =
      std::ranges::find(table.elsewhere, "tessera::cross_entropy", &PlannedCollective::reason);
  ASSERT_NE(loss, table.elsewhere.end());
  EXPECT_EQ(loss->collective, "all_reduce");
  EXPECT_FALSE(loss->backward);
  EXPECT_EQ(loss->traffic.calls, 2);
  EXPECT_EQ(loss->traffic.bytes, 3 * kTokens * 4);
}

TEST(PlanTable, PrintsWhatItHas) {
  const auto model = on_meta();
  const std::string text = to_string(record_plan(
      *model, paper_mesh(0, 2), plan_of_small_llama(true), [&] { run_step(*model, c10::kMeta); }));
  EXPECT_CONTAINS(text, "tensor parallelism on DeviceMesh((tp=2), cpu), rank 0\n",
                  "embed               rowwise_parallel      weight     Shard(0)     [13, 8]",
                  "    forward  tp reduce_scatter: 1 call, 320 bytes: result", "total: ");
}

TEST(PlanTable, IsJsonForPrograms) {
  const auto model = on_meta();
  const auto json = nlohmann::json::parse(
      to_json(check_plan(*model, paper_mesh(0, 2), plan_of_small_llama(true))));
  EXPECT_EQ(json["mesh"], "DeviceMesh((tp=2), cpu)");
  EXPECT_EQ(json["rows"][0]["fqn"], "embed");
  EXPECT_EQ(json["rows"][0]["parameters"][0]["local_sizes"], (std::vector<int>{7, 8}));
  EXPECT_EQ(json["recorded"], false);
}

}  // namespace
}  // namespace tessera::tensor_parallel
