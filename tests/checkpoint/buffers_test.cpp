// Buffers in checkpoints: those that are persistent, of our modules and of libtorch's.

#include "checkpoint/known_model.h"
#include "checkpoint/manifest.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/child.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/module.h"
#include "testing/files.h"

namespace tessera::checkpoint {
namespace {

using testing::TemporaryFolder;

/// What a module of libtorch's keeps, as batch norm its running mean.
class Stock : public torch::nn::Module {
 public:
  Stock() { mean = register_buffer("mean", at::zeros({3})); }
  at::Tensor mean;
};

struct WithBuffers : nn::Module<WithBuffers> {
  WithBuffers() {
    counts = register_buffer_slot("counts", {5});
    table = register_buffer_slot("table", {4}, /*persistent=*/false);
  }
  void reset_parameters(const nn::InitContext& init) override {
    init.set_buffer(counts, at::zeros({5}));
    init.set_buffer(table, at::arange(4, at::kFloat));
  }
  at::Tensor forward(const at::Tensor& x) { return (*linear)(x); }
  nn::Child<nn::Linear> linear{*this, "linear", 2, 3};
  nn::Child<Stock> stock{*this, "stock"};
  nn::Parameter counts, table;
};

void count(WithBuffers& model) {
  const at::NoGradGuard no_grad;
  local_tensor(model.counts).add_(7);
  local_tensor(model.table).add_(7);
  model.stock->mean.fill_(0.5);
}

/// What count() wrote is there, and what is not persistent is as it was made.
void expect_counted(const WithBuffers& model) {
  EXPECT_TRUE(at::equal(model.counts, at::full({5}, 7.0)));
  EXPECT_TRUE(at::equal(model.table, at::arange(4, at::kFloat)));
  EXPECT_TRUE(at::equal(model.stock->mean, at::full({3}, 0.5)));
}

TEST(Buffers, AreSavedAndLoadedWhenPersistent) {
  const TemporaryFolder dir;
  RunRanks(2, [&](Rank& rank) {
    WithBuffers model;
    nn::init_weights(model, 1);
    fsdp::fully_shard(model, rank.mesh({2}, {"dp"}));
    count(model);
    save(*rank.world(), dir.path(), 1, {model});
  });
  const Manifest manifest = read_manifest(dir / "step-00000001");
  EXPECT_TRUE(manifest.tensors.contains("counts") && manifest.tensors.contains("stock.mean"));
  EXPECT_FALSE(manifest.tensors.contains("table"));
  RunRanks(3, [&](Rank& rank) {
    WithBuffers model;
    load(*rank.world(), dir.path(), {model});
    nn::init_buffers(model);  // makes what was not saved
    expect_counted(model);
    nn::check_initialized(model);
  });
}

/// One has more than 1 MiB, the other is small.
struct WithLargeBuffer : nn::Module<WithLargeBuffer> {
  WithLargeBuffer() {
    large = register_buffer_slot("large", {1025, 256});
    small = register_buffer_slot("small", {3});
  }
  nn::Child<nn::Linear> linear{*this, "linear", 2, 3};
  nn::Parameter large, small;
};

// As the statistics of a norm, which each rank takes of its own rows.
TEST(Buffers, AreThoseOfRank0WhereRanksHaveTheirOwn) {
  const TemporaryFolder dir;
  RunRanks(2, [&](Rank& rank) {
    WithLargeBuffer model;
    nn::init_weights(*model.linear, 1);
    fsdp::fully_shard(model, rank.mesh({2}, {"dp"}));
    const auto fill = [&](double value) {
      model.large.slot()->set(at::full({1025, 256}, value));
      model.small.slot()->set(at::full({3}, value));
    };
    fill(rank.rank() + 1);
    save(*rank.world(), dir.path(), 1, {model});
    fill(9);
    load(*rank.world(), dir.path(), {model});
    EXPECT_TRUE(at::equal(model.large, at::ones({1025, 256})));
    EXPECT_TRUE(at::equal(model.small, at::ones({3})));
  });
}

TEST(Buffers, GoThroughAHuggingFaceFolder) {
  const TemporaryFolder dir;
  RunRanks(2, [&](Rank& rank) {
    WithBuffers model;
    nn::init_weights(model, 1);
    fsdp::fully_shard(model, rank.mesh({2}, {"dp"}));
    count(model);
    save_hugging_face(model, *rank.world(), dir / "saved", "{}");
  });
  RunRanks(3, [&](Rank& rank) {
    WithBuffers model;
    nn::init_buffers(model);
    load_hugging_face(model, *rank.world(), dir / "saved");
    expect_counted(model);
  });
}

/// As older programs wrote them.
TEST(Buffers, StayAsTheyAreWhereAHuggingFaceFolderLacksThem) {
  const TemporaryFolder dir;
  WriteModel(dir / "model.safetensors",
             {{"linear.weight", at::ones({3, 2})}, {"linear.bias", at::ones({3})}});
  WithBuffers model;
  nn::init_buffers(model);
  load_hugging_face(model, dir.path());
  EXPECT_TRUE(at::equal(model.counts, at::zeros({5})));
  nn::check_initialized(model);
}

TEST(Buffers, AreNotSavedWhenUnfilled) {
  const TemporaryFolder dir;
  RunRanks(1, [&](Rank& rank) {
    WithBuffers model;
    nn::init_weights(*model.linear, 1);
    EXPECT_ERROR(save(*rank.world(), dir.path(), 1, {model}), "buffer 'counts' was never filled");
  });
}

TEST(Buffers, AreInStateDictsAlsoWithoutFrozenParameters) {
  RunRanks(2, [](Rank& rank) {
    WithBuffers model;
    nn::init_weights(model, 1);
    count(model);
    model.linear->slot("bias")->get().requires_grad_(false);
    const StateDictOptions options{.full_state_dict = true, .ignore_frozen_params = true};
    const TensorDict state = get_model_state_dict(*rank.world(), model, options);
    EXPECT_EQ(state.size(), 3U);
    WithBuffers other;
    nn::init_weights(other, 2);
    set_model_state_dict(*rank.world(), other, state, {.full_state_dict = true, .strict = false});
    EXPECT_TRUE(at::equal(other.counts, model.counts));
    EXPECT_TRUE(at::equal(other.stock->mean, model.stock->mean));
  });
}

}  // namespace
}  // namespace tessera::checkpoint
