// Tests the traffic of a training step, to the byte.

#include <map>
#include <ostream>

#include "fsdp/training/training.h"

namespace tessera::fsdp::traffic_tests {

constexpr int kDepth = 3;

std::int64_t padded(std::int64_t rows, std::int64_t ranks) {
  return (rows + ranks - 1) / ranks;
}

std::int64_t block_shard(std::int64_t ranks) {
  return padded(kHidden, ranks) * (kDim + 1) + padded(kDim, ranks) * (kHidden + 1);
}
std::int64_t head_shard(std::int64_t ranks) {
  return padded(kClasses, ranks) * (kDim + 1);
}

/// Returns the size of the flat buffers of all units on one rank, in elements.
std::int64_t packed_units(std::int64_t ranks) {
  const std::int64_t up = padded(kHidden, ranks), down = padded(kDim, ranks);
  const std::int64_t head = padded(kClasses, ranks);
  return kDepth * packed_numel({up * kDim, up, down * kHidden, down}) +
         packed_numel({head * kDim, head});
}

comm::TrafficTable traffic_of_step(Rank& rank, const Options& options = {}) {
  Filled<SmallModel> model(kDim, kHidden, kClasses, kDepth);
  shard(model, rank.mesh({rank.size()}, {"dp"}), options);
  const Sent sent(rank);
  fsdp::loss_of(model, uniform_values({4, kDim}, 1), 0, 4).backward();
  return sent.table();
}

/// Returns the size in bytes of a block's gathered memory, rounded up for `pieces` equal parts.
/// Each parameter begins at a multiple of 64 bytes.
std::int64_t kept_block(std::int64_t ranks, std::int64_t pieces) {
  const auto round_up = [](std::int64_t bytes, std::int64_t unit) {
    return padded(bytes, unit) * unit;
  };
  const std::int64_t up = padded(kHidden, ranks), down = padded(kDim, ranks);
  std::int64_t bytes = 0;
  for (const std::int64_t numel : {up * kDim, up, down * kHidden, down}) {
    bytes += round_up(4 * ranks * numel, 64);
  }
  return round_up(bytes, 64 * pieces);
}

TEST(Traffic, IsTwoGathersAndOneReductionPerUnit) {
  RunRanks(4, [](Rank& rank) {
    for (const int neighbours : {1, 2, 4}) {
      const auto traffic = traffic_of_step(rank, {.post_forward_mesh_size = neighbours});
      EXPECT_EQ(traffic.size(), neighbours == 2 ? 3u : 2u);
      const comm::Traffic gathers = traffic.at({"dp", "all_gather"});
      const int times = neighbours == 2 ? 1 : 2;  // how often a block is gathered over "dp"
      EXPECT_EQ(gathers.calls, times * kDepth + 1);
      EXPECT_EQ(gathers.bytes, 4 * (times * kDepth * block_shard(4) + head_shard(4)));
      if (neighbours == 2) {
        const comm::Traffic backward = traffic.at({"dp/2", "all_gather"});
        EXPECT_EQ(backward.calls, kDepth);
        EXPECT_EQ(backward.bytes, kDepth * kept_block(4, 2) / 2);
      }
      const comm::Traffic reductions = traffic.at({"dp", "reduce_scatter"});
      EXPECT_EQ(reductions.calls, kDepth + 1);
      EXPECT_EQ(reductions.bytes, 4 * 4 * packed_units(4));
    }
  });
  RunRanks(1, [](Rank& rank) { EXPECT_TRUE(traffic_of_step(rank).empty()); });
}

/// The traffic of a step on 4 ranks. `bytes`: the bytes that a rank sends per element of the model
/// in ring collectives.
struct Formula {
  const char* name;
  int micro_batches;
  Options options;
  std::function<void(SmallModel&, bool last)> before;
  double bytes;
  bool replicas = false;    ///< whether the 4 ranks are 2 x 2 (HSDP)
  bool replicated = false;  ///< `replicated`: uses replicate()
};

void PrintTo(const Formula& formula, std::ostream* out) {
  *out << formula.name;
}

void apply(SmallModel& model, const DeviceMesh& mesh, const Formula& formula) {
  std::vector<nn::ModuleBase*> units;
  for (const auto& block : model.blocks) {
    units.push_back(block.get());
  }
  units.push_back(&model);
  for (nn::ModuleBase* unit : units) {
    formula.replicated ? replicate(*unit, mesh, formula.options)
                       : fully_shard(*unit, mesh, formula.options);
  }
}

/// Returns the bytes that a rank sends if every collective is a ring over its process group.
double bytes_sent(const comm::TrafficTable& traffic) {
  const std::map<std::string, double> sizes{
      {"dp", 4}, {"dp/2", 2}, {"replicate", 2}, {"shard", 2}, {"replicate_shard", 4}};
  double sent = 0;
  for (const auto& [key, entry] : traffic) {
    const auto& [group, collective] = key;
    const double ranks = sizes.at(group), bytes = static_cast<double>(entry.bytes);
    if (collective == "all_gather") {
      sent += bytes * (ranks - 1);
    }
    if (collective == "reduce_scatter") {
      sent += bytes * (ranks - 1) / ranks;
    }
    if (collective == "all_reduce") {
      sent += bytes * 2 * (ranks - 1) / ranks;
    }
  }
  return sent;
}

class TrafficFormula : public ::testing::TestWithParam<Formula> {};

TEST_P(TrafficFormula, GivesTheBytesThatARankSends) {
  const Formula& formula = GetParam();
  RunRanks(4, [&](Rank& rank) {
    Filled<SmallModel> model(32, 64, 32, kDepth);
    const auto numel = static_cast<double>(testing::parameter_values(model).numel());
    apply(model,
          formula.replicas ? rank.mesh({2, 2}, {"replicate", "shard"}) : rank.mesh({4}, {"dp"}),
          formula);
    const Sent sent(rank);
    for (int i = 0; i < formula.micro_batches; ++i) {
      if (formula.before) {
        formula.before(model, i + 1 == formula.micro_batches);
      }
      fsdp::loss_of(model, uniform_values({4, 32}, i), 0, 4).backward();
    }
    EXPECT_DOUBLE_EQ(bytes_sent(sent.table()) / numel, formula.bytes);
  });
}

// In a ring of 4 ranks, a rank sends 3/4 of the size of a gather or reduction; in a ring of 2
// ranks, 1/2.
constexpr double kOf4 = 3.0 / 4, kOf2 = 1.0 / 2, kGather = 4, kReduction = 4;
const Options kZero3{.reshard_after_forward = true}, kZero2{.reshard_after_forward = false};
const MixedPrecisionPolicy kBf16{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};

void sync_last(SmallModel& model, bool last) {
  set_requires_gradient_sync(model, last);
}
void keep_until_last(SmallModel& model, bool last) {
  set_requires_gradient_sync(model, last);
  set_reshard_after_backward(model, last);
}
void all_reduce_last(SmallModel& model, bool last) {
  set_requires_all_reduce(model, last);
}

std::vector<Formula> formulas() {
  return {
      {"Zero3", 2, kZero3, {}, 2 * (2 * kGather + kReduction) * kOf4},
      {"Zero2", 2, kZero2, {}, 2 * (kGather + kReduction) * kOf4},
      {"Zero3Bf16",
       1,
       {.mp_policy = kBf16, .reshard_after_forward = true},
       {},
       (2 * kGather / 2 + kReduction) * kOf4},
      {"Zero3SyncLast", 3, kZero3, sync_last, (6 * kGather + kReduction) * kOf4},
      {"Zero1", 3, kZero2, keep_until_last, (kGather + kReduction) * kOf4},
      {"Hpz",
       2,
       {.reshard_after_forward = true, .post_forward_mesh_size = 2},
       {},
       2 * ((kGather + kReduction) * kOf4 + kGather * kOf2)},
      {"Hsdp", 1, kZero3, {}, (2 * kGather + kReduction) * kOf2 + 2 * kReduction * kOf2 / 2, true},
      {"HsdpZero2", 1, kZero2, {}, (kGather + kReduction) * kOf2 + 2 * kReduction * kOf2 / 2, true},
      {"HsdpAllReduceLast", 3, kZero2, all_reduce_last,
       3 * (kGather + kReduction) * kOf2 + 2 * kReduction * kOf2 / 2, true},
      {"Replicate", 2, {}, {}, 2 * 2 * kReduction * kOf4, false, true},
  };
}

INSTANTIATE_TEST_SUITE_P(Modes, TrafficFormula, ::testing::ValuesIn(formulas()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace tessera::fsdp::traffic_tests
