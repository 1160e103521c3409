// forward called as a function, past the hooks that gather and reduce.

#include "fsdp/training/training.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/initialization.h"
#include "testing/module_values.h"

namespace tessera::fsdp {
namespace {

using testing::full_tensor;

/// A parameter of each kind: in a slot, and bound to a tensor.
class OwnLayer : public nn::Module<OwnLayer> {
 public:
  explicit OwnLayer(std::int64_t size) {
    weight = register_slot("weight", at::ones({size, size}));
    bias = at::ones({size});
    bind_slot("bias", bias);
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, *weight, bias); }

  nn::Parameter weight;
  at::Tensor bias;
};

/// A root whose children have no hooks: their parameters are the root's unit's.
struct OwnModel : nn::Module<OwnModel> {
  OwnModel() { testing::fill(*this); }
  at::Tensor forward(const at::Tensor& ids) { return (*layer)((*table)(ids)); }

  nn::Child<nn::Embedding> table{*this, "table", 7, 4};
  nn::Child<OwnLayer> layer{*this, "layer", 4};
};

const at::Tensor& some_rows() {
  static const at::Tensor x = at::ones({3, 4});
  return x;
}

const at::Tensor& some_ids() {
  static const at::Tensor ids = at::arange(6, at::kLong);
  return ids;
}

TEST(CallsWithoutHooks, AreRefusedWhicheverComesFirst) {
  for (const int ranks : {1, 2, 3}) {
    RunRanks(ranks, [&](Rank& rank) {
      OwnLayer layer(4);
      fully_shard(layer, rank.mesh({ranks}, {"dp"}));
      EXPECT_ERROR(layer.forward(some_rows()),
                   "argument 1, [3, 4], is plain; argument 2, 'weight', [4, 4]",
                   "(*m)(x) and not as m->forward(x)");
      const at::Tensor out = layer(some_rows());
      EXPECT_ERROR(layer.forward(some_rows()), "(*m)(x) and not as m->forward(x)");
      out.sum().backward();
      EXPECT_TRUE(full_tensor(layer.slot("bias")->persistent().grad()).equal(at::ones({4}).mul(3)));
      EXPECT_ERROR(layer.forward(some_rows()), "(*m)(x) and not as m->forward(x)");
    });
  }
}

TEST(CallsWithoutHooks, AreRefusedOfReplicasAndOfUnitsThatStayGathered) {
  RunRanks(2, [](Rank& rank) {
    OwnLayer copy(4);
    replicate(copy, rank.mesh({2}, {"dp"}));
    OwnModel model;
    fully_shard(*model.layer, rank.mesh({2}, {"dp"}), {.reshard_after_forward = false});
    fully_shard(model, rank.mesh({2}, {"dp"}));
    copy(some_rows());
    model(some_ids());
    EXPECT_ERROR(copy.forward(some_rows()), "(*m)(x) and not as m->forward(x)");
    EXPECT_ERROR(model.layer->forward(some_rows()), "(*m)(x) and not as m->forward(x)");
  });
}

TEST(CallsWithoutHooks, AreRefusedWhereAnEmbeddingComesFirst) {
  RunRanks(2, [](Rank& rank) {
    OwnModel model;
    fully_shard(model, rank.mesh({2}, {"dp"}));
    EXPECT_ERROR(model.forward(some_ids()), "argument 0, 'table.weight', [7, 4] on (dp=2)",
                 "call the module of 'table.weight' as (*m)(x) and not as");
    model(some_ids());
    EXPECT_ERROR(model.forward(some_ids()), "argument 0, 'table.weight', [7, 4] on (dp=2)");
  });
}

TEST(CallsWithoutHooks, ToAUnitThatMayBeUnusedAreRefusedInTheRootsForward) {
  /// Calls its layer as it should not.
  struct Skips : nn::Module<Skips> {
    at::Tensor forward(const at::Tensor& x) { return layer->forward(x); }
    nn::Child<OwnLayer> layer{*this, "layer", 4};
  };
  RunRanks(2, [](Rank& rank) {
    Skips model;
    fully_shard(*model.layer, rank.mesh({2}, {"dp"}), {.may_be_unused = true});
    fully_shard(model, rank.mesh({2}, {"dp"}));
    EXPECT_ERROR(model(some_rows()), "'layer.weight'", "(*m)(x) and not as m->forward(x)");
  });
}

TEST(Slots, HoldUnshardedTensorsInForwardAndOnRequest) {
  RunRanks(2, [](Rank& rank) {
    OwnLayer layer(4);
    fully_shard(layer, rank.mesh({2}, {"dp"}));
    const auto shown = [&] { return !tessera::is_distributed(layer.weight); };
    const at::Tensor out = layer(some_rows());
    EXPECT_FALSE(shown());
    const comm::TrafficTable before = rank.world()->traffic().table();
    {
      const UnshardScope scope(layer);
      EXPECT_TRUE(shown());
    }
    EXPECT_FALSE(shown());
    EXPECT_TRUE(layer.slot("weight")->gathered());
    EXPECT_ERROR(layer.to(at::kBFloat16), "FSDP has gathered its parameter 'weight'");
    out.sum().backward();
    EXPECT_FALSE(layer.slot("weight")->gathered());
    // It stayed gathered: the scope and backward found it so.
    const auto& table = rank.world()->traffic().table();
    EXPECT_EQ(testing::traffic_of(table, "dp", "all_gather").calls,
              testing::traffic_of(before, "dp", "all_gather").calls);
    unshard(layer);
    EXPECT_TRUE(shown());
    reshard(layer);
    EXPECT_FALSE(shown());
  });
}

TEST(UnfilledStorage, IsRefusedBeforeAnythingIsGathered) {
  RunRanks(2, [](Rank& rank) {
    const auto model = testing::made_on_meta<nn::Linear>(4, 4);
    fully_shard(*model, rank.mesh({2}, {"dp"}));
    EXPECT_ERROR((*model)(some_rows()), "'weight', 'bias'", "nn::to_empty");
    nn::to_empty(*model, at::kCPU);
    EXPECT_ERROR((*model)(some_rows()), "'weight', 'bias'", "nn::init_weights");
    EXPECT_TRUE(rank.world()->traffic().table().empty());
    nn::init_weights(*model, 0);
    EXPECT_NO_THROW((*model)(some_rows()).sum().backward());
  });
}

}  // namespace
}  // namespace tessera::fsdp
