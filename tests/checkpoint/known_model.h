#pragma once

// A model and optimizer state with known values, for tests of saving and loading.

#include <c10/util/Exception.h>

#include <filesystem>
#include <map>

#include "checkpoint/format.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/dtensor/detail/make_distributed.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "testing/distributed.h"

namespace tessera::checkpoint {

using Tensors = std::map<std::string, at::Tensor>;

/// A model with sizes that are not divisible by 2 or 4.
struct Net : nn::Module<Net> {
  explicit Net(bool tied = false) {
    if (tied) {
      head->tie_slot("weight", embed->slot("weight"));
    }
  }
  nn::Child<nn::Embedding> embed{*this, "embed", 11, 5};
  nn::Child<nn::Linear> middle{*this, "middle", 5, 7};
  nn::Child<nn::Linear> head{*this, "head", 5, 11, nn::LinearOptions{false}};
};

/// Returns the known values: different numbers for each parameter of a Net.
inline Tensors Values() {
  return {{"embed.weight", at::arange(55, at::kFloat).view({11, 5})},
          {"middle.weight", at::arange(100, 135, at::kFloat).view({7, 5})},
          {"middle.bias", at::arange(200, 207, at::kFloat)},
          {"head.weight", at::arange(300, 355, at::kFloat).view({11, 5})}};
}

inline void WriteModel(const std::filesystem::path& path, const Tensors& tensors) {
  std::vector<SafetensorsWriter::Item> items;
  for (const auto& [name, tensor] : tensors) {
    items.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  }
  SafetensorsWriter writer(path, items);
  for (const auto& [name, tensor] : tensors) {
    writer.write(name, tensor);
  }
  writer.finish();
}

inline Tensors ReadModel(const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  Tensors tensors;
  for (const auto& [name, entry] : file.tensors()) {
    tensors[name] = file.read(name);
  }
  return tensors;
}

inline void ExpectEqual(const Tensors& found, const Tensors& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(found.contains(name)) << name;
    EXPECT_TRUE(at::equal(found.at(name), tensor)) << name;
  }
}

/// Returns copies of this rank's local tensors of a module's parameters.
inline Tensors LocalValues(const nn::ModuleBase& module) {
  Tensors values;
  for (const auto& [name, slot] : module.named_slots()) {
    values[name] = local_tensor(slot->persistent()).detach().clone();
  }
  return values;
}

/// Distributes the parameters over the mesh, each parameter with different placements.
inline void Distribute(Net& net, const DeviceMesh& mesh, const Tensors& values) {
  const std::map<std::string, Placements> placements = {{"embed.weight", {Shard{0}, Shard{0}}},
                                                        {"middle.weight", {Shard{0}, Shard{1}}},
                                                        {"middle.bias", {Shard{0}, Replicate{}}},
                                                        {"head.weight", {Shard{1}, Shard{0}}}};
  for (const auto& [name, slot] : net.named_slots()) {
    slot->set(distribute_tensor(values.at(name), mesh, placements.at(name)));
    slot->set_initialized(true);
  }
}

inline Tensors Zeros() {
  Tensors zeros;
  for (const auto& [name, tensor] : Values()) {
    zeros[name] = at::zeros_like(tensor);
  }
  return zeros;
}

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// A Net on a mesh (dp, tp), with AdamW state. Parameters have the values Values() + `add`, and
/// exp_avg is 1000 times the parameter.
struct SavedState {
  SavedState(Rank& rank, const std::vector<std::int64_t>& mesh_sizes, int add = 0,
             bool tied = false)
      : net(tied) {
    const DeviceMesh mesh = rank.mesh(mesh_sizes, {"dp", "tp"});
    Tensors values = Values();
    for (auto& [name, tensor] : values) {
      tensor = tensor + add;
    }
    Distribute(net, mesh, values);
    for (const auto& [name, slot] : net.named_slots()) {
      const at::Tensor& tensor = slot->persistent();
      optimizer.emplace_back(name + ".exp_avg",
                             make_distributed(local_tensor(tensor).detach() * 1000,
                                              sharding_spec(tensor), tensor.sizes().vec()));
      optimizer.emplace_back(name + ".step", at::full({}, 7.0F + static_cast<float>(add)));
    }
  }
  StateDict dict() { return {net, optimizer, {{"samples", 640}}}; }
  /// Returns this rank's local parameters and optimizer tensors, by name.
  Tensors local() const {
    Tensors values = LocalValues(net);
    for (const auto& [name, tensor] : optimizer) {
      values[name] = local_tensor(tensor).clone();
    }
    return values;
  }

  Net net;
  NamedTensors optimizer;
};

/// Saves a step on a 2 × 2 mesh. The values are Values() + `add`.
inline void SaveStep(const std::filesystem::path& dir, std::int64_t step, int add = 0,
                     const SaveOptions& options = {}) {
  RunRanks(4, [&](Rank& rank) {
    SavedState state(rank, {2, 2}, add);
    save(*rank.world(), dir, step, state.dict(), options);
  });
}

/// Loads the newest step on one rank and expects Values() + `add`. Returns the step number.
inline std::int64_t ExpectLoads(const std::filesystem::path& dir, int add) {
  std::int64_t step = -1;
  RunRanks(1, [&](Rank& rank) {
    SavedState loaded(rank, {1, 1}, -5000);
    const SavedState expected(rank, {1, 1}, add);
    step = load(*rank.world(), dir, loaded.dict()).step;
    ExpectEqual(loaded.local(), expected.local());
  });
  return step;
}

/// Collects warnings. Install it with a c10::WarningUtils::WarningHandlerGuard.
class HeardWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;
};

}  // namespace tessera::checkpoint
