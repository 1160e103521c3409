#pragma once

// A small model to train on several ranks, and on one rank with the whole batch for comparison.

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <initializer_list>
#include <optional>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::fsdp {

using testing::ErrorsOfRanks;
using testing::expect_gradients;
using testing::Filled;
using testing::gradients_of;
using testing::name_of_case;

/// Returns the number of elements of a flat fp32 buffer for shards with `shards` elements each.
/// Each shard begins at a multiple of 64 bytes.
constexpr std::int64_t packed_numel(std::initializer_list<std::int64_t> shards) {
  constexpr std::int64_t kUnit = 16;
  std::int64_t numel = 0;
  for (const std::int64_t shard : shards) {
    numel += (shard + kUnit - 1) / kUnit * kUnit;
  }
  return numel;
}

struct Block : nn::Module<Block> {
  Block(std::int64_t dim, std::int64_t hidden)
      : up(*this, "up", dim, hidden), down(*this, "down", hidden, dim) {}
  at::Tensor forward(const at::Tensor& x) { return x + (*down)(at::silu((*up)(x))); }
  nn::Child<nn::Linear> up, down;
};

/// A model of `depth` blocks and a head. Maps (rows, dim) to (rows, classes).
struct SmallModel : nn::Module<SmallModel> {
  SmallModel(std::int64_t dim, std::int64_t hidden, std::int64_t classes, int depth = 3) {
    for (int i = 0; i < depth; ++i) {
      blocks.push_back(
          register_module("block" + std::to_string(i), std::make_shared<Block>(dim, hidden)));
    }
    head = register_module("head", std::make_shared<nn::Linear>(dim, classes));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : blocks) {
      x = (*block)(x);
    }
    return (*head)(x);
  }
  std::vector<std::shared_ptr<Block>> blocks;
  std::shared_ptr<nn::Linear> head;
};

struct OptionalLayer : nn::Module<OptionalLayer> {
  at::Tensor forward(const at::Tensor& x, bool use_extra) {
    const at::Tensor y = (*base)(x);
    return use_extra ? (*extra)(y) : y;
  }
  nn::Child<nn::Linear> base{*this, "base", 3, 3}, extra{*this, "extra", 3, 3};
};

inline at::Tensor loss_of(SmallModel& model, const at::Tensor& batch, std::int64_t first,
                          std::int64_t rows) {
  return model(batch.narrow(0, first, rows)).square().mean();
}

constexpr std::int64_t kRows = 12;  // number of rows of the whole batch

/// 7 is not divisible by 2, 3 or 4, so 2, 3 or 4 ranks get uneven shards.
constexpr std::int64_t kDim = 7, kHidden = 10, kClasses = 3;

struct Sizes {
  std::int64_t dim = kDim, hidden = kHidden, classes = kClasses;
};

inline at::Tensor batch(std::int64_t dim, int step) {
  return uniform_values({kRows, dim}, 100 + step);
}

inline at::Tensor rows_of_rank(const Rank& rank, std::int64_t dim = kDim) {
  const std::int64_t rows = kRows / rank.size();
  return batch(dim, 0).narrow(0, rank.rank() * rows, rows);
}

inline at::Tensor local_loss(SmallModel& model, const Rank& rank, int step = 0) {
  const std::int64_t rows = kRows / rank.size();
  return loss_of(model, batch(model.head->in_features(), step), rank.rank() * rows, rows);
}

inline void shard_units(const std::vector<nn::ModuleBase*>& units, const DeviceMesh& mesh,
                        const Options& options = {}) {
  for (nn::ModuleBase* unit : units) {
    fully_shard(*unit, mesh, options);
  }
}

/// Makes each block and the root an FSDP unit. The root's parameters stay unsharded after forward.
inline void shard(SmallModel& model, const DeviceMesh& mesh, const Options& options = {}) {
  for (const auto& block : model.blocks) {
    fully_shard(*block, mesh, options);
  }
  Options root = options;
  root.post_forward_mesh_size = 1;
  fully_shard(model, mesh, root);
}

struct ShardedModel : SmallModel {
  explicit ShardedModel(const DeviceMesh& mesh, const Options& options = {},
                        const Sizes& sizes = {})
      : SmallModel(sizes.dim, sizes.hidden, sizes.classes) {
    testing::fill(*this);
    shard(*this, mesh, options);
  }
};

/// A test case: a mesh, and the options of fully_shard().
struct Arrangement {
  const char* name;
  std::vector<std::int64_t> sizes;
  std::vector<std::string> names;
  Options options{};
};

/// Shards along the last dimension are not contiguous, so FSDP must pack and unpack the shards.
inline std::optional<Placement> by_columns(const std::string&, const at::Tensor& parameter) {
  return Shard{parameter.dim() - 1};
}

inline std::vector<Arrangement> arrangements(const std::vector<std::string>& names) {
  const std::vector<Arrangement> all{
      {"OneRank", {1}, {"dp"}},
      {"Zero3", {3}, {"dp"}},
      {"Uneven", {4}, {"dp"}},
      {"EmptyShards", {12}, {"dp"}},
      {"Zero2", {2}, {"dp"}, {.reshard_after_forward = false}},
      {"Hpz", {4}, {"dp"}, {.post_forward_mesh_size = 2}},
      {"Hsdp", {2, 2}, {"replicate", "shard"}},
      {"Columns", {3}, {"dp"}, {.shard_placement = by_columns}},
      {"Bf16", {4}, {"dp"}, {.mp_policy = {.param_dtype = at::kBFloat16}}},
      {"Bf16OnOneRank", {1}, {"dp"}, {.mp_policy = {.param_dtype = at::kBFloat16}}},
      {"Offloaded", {2}, {"dp"}, {.offload_policy = OffloadPolicy{}}}};
  std::vector<Arrangement> chosen;
  for (const std::string& name : names) {
    chosen.push_back(*std::ranges::find(all, name, [](const Arrangement& a) { return a.name; }));
  }
  return chosen;
}

using ShardedBody = std::function<void(Rank&, ShardedModel&)>;

inline void RunArranged(const Arrangement& arrangement, const Sizes& sizes,
                        const ShardedBody& body) {
  RunOnMesh(arrangement.sizes, arrangement.names, [&](Rank& rank, const DeviceMesh& mesh) {
    ShardedModel model(mesh, arrangement.options, sizes);
    body(rank, model);
  });
}
inline void RunArranged(const Arrangement& arrangement, const ShardedBody& body) {
  RunArranged(arrangement, Sizes{}, body);
}

inline void RunSharded(int ranks, const Options& options, const ShardedBody& body) {
  RunArranged({"", {ranks}, {"dp"}, options}, body);
}
inline void RunSharded(int ranks, const ShardedBody& body) {
  RunSharded(ranks, Options{}, body);
}

inline void RunHybrid(const Options& options, const ShardedBody& body) {
  RunArranged({"", {2, 2}, {"replicate", "shard"}, options}, body);
}
inline void RunHybrid(const ShardedBody& body) {
  RunHybrid(Options{}, body);
}

/// Runs backward for the batch of each of `steps` on one rank. Returns the sums of the gradients.
inline std::vector<at::Tensor> gradients_alone(const Sizes& sizes = {},
                                               const std::vector<int>& steps = {0}) {
  Filled<SmallModel> alone(sizes.dim, sizes.hidden, sizes.classes);
  for (const int step : steps) {
    loss_of(alone, batch(sizes.dim, step), 0, kRows).backward();
  }
  return gradients_of(alone);
}

inline at::Tensor full_grad(const nn::ModuleBase& module, const std::string& name = "weight") {
  return full_tensor(module.slot(name)->persistent().grad());
}

inline void drop_gradients(const nn::ModuleBase& model) {
  for (const auto& [name, slot] : model.named_slots()) {
    slot->persistent().mutable_grad().reset();
  }
}

/// Returns the gathered gradients of all parameters, and removes `.grad`. Collective.
inline std::vector<at::Tensor> take_gradients(const nn::ModuleBase& model) {
  std::vector<at::Tensor> gradients;
  for (const auto& [name, slot] : model.named_slots()) {
    gradients.push_back(full_tensor(slot->persistent().grad()).clone());
    slot->persistent().mutable_grad().reset();
  }
  return gradients;
}

inline std::vector<at::Tensor> parameters_of(const nn::ModuleBase& model) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, slot] : model.named_slots()) {
    tensors.push_back(slot->persistent());
  }
  return tensors;
}

/// Trains on one rank by SGD with a learning rate of 0.1. Returns the parameters.
inline std::vector<at::Tensor> train_alone(int steps) {
  Filled<SmallModel> model(kDim, kHidden, kClasses);
  for (int step = 0; step < steps; ++step) {
    loss_of(model, batch(kDim, step), 0, kRows).backward();
    for (const at::Tensor& parameter : parameters_of(model)) {
      parameter.detach().sub_(parameter.grad() * 0.1);
    }
    drop_gradients(model);
  }
  return parameters_of(model);
}

inline void expect_all_sharded(const nn::ModuleBase& model) {
  for (const auto& [name, slot] : model.named_slots()) {
    EXPECT_TRUE(tessera::is_distributed(slot->get())) << name;
  }
}

/// While a Warnings object exists, it collects this thread's libtorch warnings that contain `part`.
class Warnings final : public c10::WarningHandler {
 public:
  explicit Warnings(std::string part = "") : part_(std::move(part)) {}
  void process(const c10::Warning& warning) override {
    if (warning.msg().find(part_) != std::string::npos) {
      messages_.push_back(warning.msg());
    }
  }
  const std::vector<std::string>& messages() const { return messages_; }

 private:
  std::string part_;
  std::vector<std::string> messages_;
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

}  // namespace tessera::fsdp

/// Declares a parametrized suite, and instantiates the suite with the named Arrangements.
#define TESSERA_ARRANGED(suite, ...)                                                          \
  class suite : public ::testing::TestWithParam<::tessera::fsdp::Arrangement> {};             \
  INSTANTIATE_TEST_SUITE_P(Meshes, suite,                                                     \
                           ::testing::ValuesIn(::tessera::fsdp::arrangements({__VA_ARGS__})), \
                           ::tessera::testing::name_of_case<::tessera::fsdp::Arrangement>)

/// A test whose body runs on every rank with a sharded model: TEST_SHARDED(Suite, Name, 2) { ...
/// rank, model ... }. The arguments after Name are those of RunSharded().
#define TEST_SHARDED(suite, name, ...)                                                  \
  static void suite##_##name##_sharded(::tessera::testing::Rank& rank,                  \
                                       ::tessera::fsdp::ShardedModel& model);           \
  TEST(suite, name) {                                                                   \
    ::tessera::fsdp::RunSharded(__VA_ARGS__, &suite##_##name##_sharded);                \
  }                                                                                     \
  static void suite##_##name##_sharded([[maybe_unused]] ::tessera::testing::Rank& rank, \
                                       [[maybe_unused]] ::tessera::fsdp::ShardedModel& model)
