// Objects of a program in a checkpoint: those that are equal on all ranks, and those of each rank's
// own, on as many ranks and on others.

#include <limits>
#include <nlohmann/json.hpp>

#include "checkpoint/manifest.h"
#include "saved_state.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/checkpoint/stateful.h"
#include "testing/files.h"

namespace tessera::checkpoint {
namespace {

using testing::ErrorsOfRanks;
using testing::TemporaryFolder;
using Names = std::vector<std::string>;

struct Schedule final : Stateful {
  explicit Schedule(double factor) : factor(factor) {}
  nlohmann::json state_dict() const override { return {{"factor", factor}}; }
  void load_state_dict(const nlohmann::json& state) override { factor = state.at("factor"); }
  double factor;
};

StateDict with_objects(nn::ModuleBase& model, NamedStateful stateful, NamedRankStates ranks = {}) {
  return {.model = model, .stateful = std::move(stateful), .rank_states = std::move(ranks)};
}

std::unique_ptr<Net> net_on(Rank& rank, int add = 0) {
  auto net = std::make_unique<Net>();
  Tensors values = Values();
  for (auto& [name, tensor] : values) {
    tensor = tensor + add;
  }
  Distribute(*net, rank.mesh({rank.size(), 1}, {"dp", "tp"}), values);
  return net;
}

TEST(Objects, AreSavedByRank0AndLoadedOnAllRanks) {
  const TemporaryFolder dir;
  RunRanks(2, [&](Rank& rank) {
    const auto net = net_on(rank);
    Schedule schedule(0.25 + rank.rank());
    SaveFuture pending =
        async_save(*rank.world(), dir.path(), 1, with_objects(*net, {{"schedule", &schedule}}));
    schedule.factor = 7;  // the next step's
    pending.wait();
    load(*rank.world(), dir.path(), with_objects(*net, {{"schedule", &schedule}}));
    EXPECT_EQ(schedule.factor, 0.25);
  });
  EXPECT_CONTAINS(describe_step(dir / "step-00000001"), R"(object "schedule" {"factor":0.25})");
}

TEST(Objects, ChangeNothingWhenMissingUnexpectedOrUnfit) {
  const TemporaryFolder dir;
  RunRanks(1, [&](Rank& rank) {
    Schedule schedule(1);
    save(*rank.world(), dir.path(), 1, with_objects(*net_on(rank), {{"schedule", &schedule}}));
  });
  const auto errors = [&](const NamedStateful& objects) {
    const auto all = ErrorsOfRanks(2, [&](Rank& rank) {
      const auto net = net_on(rank, 9);
      const Tensors before = LocalValues(*net);
      try {
        load(*rank.world(), dir.path(), with_objects(*net, objects));
      } catch (const Error&) {
        ExpectEqual(LocalValues(*net), before);
        throw;
      }
    });
    EXPECT_EQ(all[0], all[1]);
    return all[0];
  };
  Schedule other(2);
  EXPECT_CONTAINS(errors({{"other", &other}}), "missing: other; unexpected: schedule");
  struct Strict final : Stateful {
    nlohmann::json state_dict() const override { return {}; }
    void load_state_dict(const nlohmann::json& state) override { state.at("rate"); }
  } strict;
  EXPECT_CONTAINS(errors({{"schedule", &strict}}),
                  "the state of 'schedule' in the checkpoint cannot be taken: ", "'rate'");
  RunRanks(1, [&](Rank& rank) {
    const auto net = net_on(rank);
    const auto load_other = [&](const LoadOptions& options) {
      return load(*rank.world(), dir.path(), with_objects(*net, {{"other", &other}}), options);
    };
    EXPECT_EQ(load_other({.partial = true}).missing, Names{"other"});
    EXPECT_TRUE(load_other({.exclude = {"other", "sch*"}}).missing.empty());
    EXPECT_EQ(other.factor, 2);
  });
}

TEST(Objects, NeedUniqueNamesAndStatesThatJsonCanHold) {
  const TemporaryFolder dir;
  RunRanks(1, [&](Rank& rank) {
    const auto net = net_on(rank);
    Schedule one(1), infinite(std::numeric_limits<double>::infinity());
    PerRank<int> count(0, sum_of<int>);
    const auto save_them = [&](const NamedStateful& stateful, const NamedRankStates& ranks) {
      save(*rank.world(), dir.path(), 1, with_objects(*net, stateful, ranks));
    };
    EXPECT_ERROR(save_them({{"a", &one}}, {{"a", &count}}), "two objects named 'a'");
    EXPECT_ERROR(save_them({{"", &one}}, {}), "one without a name");
    EXPECT_ERROR(save_them({{"\xff", &one}}, {}), "the name of an object would be read as other");
    EXPECT_ERROR(save_them({{"a", &infinite}}, {}), "the state of 'a' would be read as other");
  });
  const auto errors = ErrorsOfRanks(2, [&](Rank& rank) {
    PerRank<int> count(0, sum_of<int>);
    const std::string name = rank.rank() == 0 ? "count" : "counts";
    save(*rank.world(), dir.path(), 1, with_objects(*net_on(rank), {}, {{name, &count}}));
  });
  EXPECT_CONTAINS(errors[0], "ranks 1 have another model, optimizer or objects than rank 0");
}

/// What ranks have after a load of what three ranks saved as 1, 10 and 100.
std::vector<int> counts_on(int ranks) {
  const TemporaryFolder dir;
  RunRanks(3, [&](Rank& rank) {
    PerRank<int> count(0, sum_of<int>);
    count.value = std::vector<int>{1, 10, 100}[static_cast<std::size_t>(rank.rank())];
    save(*rank.world(), dir.path(), 1, with_objects(*net_on(rank), {}, {{"count", &count}}));
    EXPECT_EQ(count.value, std::vector<int>({1, 10, 100})[static_cast<std::size_t>(rank.rank())]);
  });
  std::vector<int> counts(static_cast<std::size_t>(ranks));
  RunRanks(ranks, [&](Rank& rank) {
    PerRank<int> count(0, sum_of<int>);
    count.value = 5;
    load(*rank.world(), dir.path(), with_objects(*net_on(rank), {}, {{"count", &count}}));
    counts[static_cast<std::size_t>(rank.rank())] = count.value;
  });
  return counts;
}

TEST(RankStates, AreLoadedOnTheirRanksOrMergedOnRank0) {
  EXPECT_EQ(counts_on(3), (std::vector<int>{1, 10, 100}));
  EXPECT_EQ(counts_on(1), (std::vector<int>{111}));
  EXPECT_EQ(counts_on(4), (std::vector<int>{111, 0, 0, 0}));
}

TEST(RankStates, AreResetWhereNotSaved) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);  // as older versions have written them
  EXPECT_FALSE(testing::ReadFile(dir / "step-00000001/manifest.json").find("rank_states") !=
               std::string::npos);
  RunRanks(2, [&](Rank& rank) {
    PerRank<int> count(3, sum_of<int>), kept(3, sum_of<int>);
    count.value = kept.value = 8;
    const LoadReport report =
        load(*rank.world(), dir.path(),
             with_objects(*net_on(rank), {}, {{"count", &count}, {"kept", &kept}}),
             {.exclude = {"optimizer.**", "kept"}});
    EXPECT_EQ(count.value, 3);
    EXPECT_EQ(kept.value, 8);
    EXPECT_EQ(report.missing, Names{"count"});
  });
}

}  // namespace
}  // namespace tessera::checkpoint
