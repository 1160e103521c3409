// In-place operators on expanded tensors, where several positions share memory: what
// libtorch accepts of a plain one works, in every placement of the tensor that is expanded, and
// what it refuses is refused on all ranks.

#include "testing/distributed.h"

namespace tessera {
namespace {

struct Write {
  const char* name;
  std::function<void(at::Tensor)> run;
};
std::ostream& operator<<(std::ostream& out, const Write& write) {
  return out << write.name;
}

at::Tensor index() {
  return at::arange(1, 2);
}

const std::vector<Placement> kPlacements{Shard{0}, Shard{1}, Partial{}, Partial{ReduceOp::kAvg},
                                         Partial{ReduceOp::kMax}};

class Expanded : public ::testing::TestWithParam<Write> {};

TEST_P(Expanded, IsWrittenAsOnOneRank) {
  RunRanks(3, [](Rank& rank) {
    const auto value = at::arange(4.0).view({1, 4});
    for (const auto& placement : kPlacements) {
      const auto row = distribute_tensor(value, rank.mesh({3}, {"x"}), {placement}).tensor();
      const auto x = row.detach().expand({4, 4}), expected = value.clone().expand({4, 4});
      GetParam().run(x);
      GetParam().run(expected);
      EXPECT_EQ(x.sizes(), expected.sizes());
      EXPECT_TRUE(at::equal(DistributedTensor(x).full_tensor(), expected)) << to_string(placement);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    InPlace, Expanded,
    ::testing::Values(Write{"fill", [](auto x) { x.fill_(7); }},
                      Write{"zero", [](auto x) { x.zero_(); }},
                      Write{"transpose", [](auto x) { x.transpose_(0, 1); }},
                      Write{"squeeze", [](auto x) { x.squeeze_(); }},
                      Write{"index_fill_rows", [](auto x) { x.index_fill_(0, index(), 2); }},
                      Write{"index_fill_columns", [](auto x) { x.index_fill_(1, index(), 2); }},
                      Write{"fill_diagonal", [](auto x) { x.fill_diagonal_(3); }},
                      Write{"fill_rows", [](auto x) { x.slice(0, 2, 4).fill_(2); }},
                      Write{"fill_a_column", [](auto x) { x.select(1, 1).fill_(2); }},
                      Write{"fill_the_end_of_a_column",
                            [](auto x) { x.slice(0, 2, 4).select(1, 1).fill_(2); }}),
    [](const auto& param_info) { return std::string(param_info.param.name); });

TEST(ExpandedTensor, IsRefusedOnAllRanksWhereLibtorchRefusesIt) {
  RunRanks(3, [](Rank& rank) {
    const auto value = at::arange(4.0).view({1, 4});  // the third rank has no column
    const auto row = distribute_tensor(value, rank.mesh({3}, {"x"}), {Shard{1}}).tensor().detach();
    EXPECT_THROWN(std::exception, row.expand({4, 4}).mul_(2), "refers to a single memory location");
    EXPECT_TRUE(at::equal(DistributedTensor(row).full_tensor(), value));
  });
}

}  // namespace
}  // namespace tessera
