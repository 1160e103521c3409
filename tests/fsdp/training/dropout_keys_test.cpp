// Dropouts of an uninitialised model: weights are loaded, or made by constructors.

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/child.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/linear.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/files.h"
#include "testing/module_values.h"

namespace tessera::fsdp {
namespace {
namespace dropout_keys {

constexpr std::int64_t kRows = 6, kDim = 7;

struct DropBlock : nn::Module<DropBlock> {
  at::Tensor forward(const at::Tensor& x) { return x + (*down)((*drop)(at::gelu((*up)(x)))); }
  nn::Child<nn::Linear> up{*this, "up", kDim, 5};
  nn::Child<nn::Dropout> drop{*this, "drop", 0.5};
  nn::Child<nn::Linear> down{*this, "down", 5, kDim};
};

/// (rows, dim) -> a loss.
struct Model : nn::Module<Model> {
  Model() {
    for (int i = 0; i < 3; ++i) {
      blocks->push_back(std::make_shared<DropBlock>());
    }
    testing::fill(*this);
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < 3; ++i) {
      x = (*blocks->at<DropBlock>(i))(x);
    }
    return x.square().mean();
  }
  std::vector<RandomKey> keys() const {
    std::vector<RandomKey> found;
    for (std::size_t i = 0; i < 3; ++i) {
      found.push_back(blocks->at<DropBlock>(i)->drop->key().value());
    }
    return found;
  }
  nn::Child<nn::ModuleList> blocks{*this, "blocks"};
};

at::Tensor rows_of(std::int64_t rank, std::int64_t ranks) {
  const std::int64_t rows = kRows / ranks;
  return testing::uniform_values({kRows, kDim}, 0.4).narrow(0, rank * rows, rows);
}

std::vector<at::Tensor> gradients_alone() {
  Model alone;
  alone(rows_of(0, 1)).backward();
  return testing::gradients_of(alone);
}

void shard(Model& model, const DeviceMesh& mesh) {
  using namespace tensor_parallel;
  parallelize_module(model, mesh["tp"],
                     {{"blocks.*.up", colwise_parallel()}, {"blocks.*.down", rowwise_parallel()}});
  // Units are made from the leaves on, so that a block is asked for its names before the model is.
  for (std::size_t i = 0; i < 3; ++i) {
    fully_shard(*model.blocks->at<DropBlock>(i), mesh["dp"]);
  }
  fully_shard(model, mesh["dp"]);
}

void expect_distinct(const std::vector<RandomKey>& keys) {
  EXPECT_NE(keys[0].stream, keys[1].stream);
  EXPECT_NE(keys[0].stream, keys[2].stream);
  EXPECT_NE(keys[1].stream, keys[2].stream);
}

TEST(DropoutKeys, FollowFromNamesAndDropTheSameOnEveryMesh) {
  const auto expected = gradients_alone();
  for (const auto& sizes :
       std::vector<std::vector<std::int64_t>>{{1, 1}, {2, 1}, {1, 2}, {3, 1}, {2, 2}}) {
    RunRanks(static_cast<int>(sizes[0] * sizes[1]), [&](Rank& rank) {
      const DeviceMesh mesh = rank.mesh(sizes, {"dp", "tp"});
      Model model;
      shard(model, mesh);
      model(rows_of(mesh.local_rank("dp"), sizes[0])).backward();
      testing::expect_gradients(model, expected);
      expect_distinct(model.keys());
    });
  }
}

TEST(DropoutKeys, AreTheSameAfterALoadAndContinue) {
  testing::TemporaryFolder folder;
  // The masks of the second call.
  std::vector<at::Tensor> expected;
  std::vector<RandomKey> keys;
  RunRanks(1, [&](Rank& rank) {
    Model first;
    first(rows_of(0, 1));
    checkpoint::save(*rank.world(), folder.path(), 1, {first});
    first(rows_of(0, 1)).backward();
    expected = testing::gradients_of(first);
    keys = first.keys();
  });
  RunOnMesh({2, 1}, {"dp", "tp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Model again;
    shard(again, mesh);
    checkpoint::load(*rank.world(), folder.path(), {again});
    again(rows_of(rank.rank(), 2)).backward();
    testing::expect_gradients(again, expected);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      EXPECT_EQ(again.keys()[i].stream, keys[i].stream);
    }
  });
}

TEST(DropoutKeys, DoNotDependOnOtherModels) {
  const auto expected = gradients_alone();
  Model first, second;
  first(rows_of(0, 1));
  first(rows_of(0, 1));
  second(rows_of(0, 1)).backward();
  testing::expect_gradients(second, expected);
}

TEST(DropoutKeys, ErrorsNameTheModuleAndItsUnit) {
  RunRanks(2, [](Rank& rank) {
    Model model;
    shard(model, rank.mesh({2, 1}, {"dp", "tp"}));
    EXPECT_THROWN(c10::Error, model(at::ones({2, kDim + 1})), "mat1 and mat2 shapes",
                  "(in module 'blocks.0.up', a ", "Linear, in unit 'blocks.0')");
  });
}

}  // namespace dropout_keys
}  // namespace
}  // namespace tessera::fsdp
