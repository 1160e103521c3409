#pragma once

// A model and an optimizer state with known values, for tests of save() and load().

#include <c10/util/Exception.h>

#include <map>

#include "checkpoint/format.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/dtensor/detail/make_distributed.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "testing/distributed.h"
#include "testing/files.h"

namespace tessera::checkpoint {

using Names = std::vector<std::string>;
using Tensors = std::map<std::string, at::Tensor>;
using testing::ErrorsOfRanks;
using testing::FilesIn;
using testing::full_tensor;
using testing::ReadFile;
using testing::TemporaryFolder;
using testing::WriteFile;

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

/// Returns different values for all elements of a Net's parameters. `add` is added to each value.
inline Tensors Values(double add = 0, c10::ScalarType type = at::kFloat) {
  const auto numbers = [&](int first, int end) {
    return at::arange(first, end, at::kFloat).to(type) + add;
  };
  return {{"embed.weight", numbers(0, 55).view({11, 5})},
          {"middle.weight", numbers(100, 135).view({7, 5})},
          {"middle.bias", numbers(200, 207)},
          {"head.weight", numbers(300, 355).view({11, 5})}};
}

inline std::vector<SafetensorsWriter::Item> ItemsOf(const Tensors& tensors) {
  std::vector<SafetensorsWriter::Item> items;
  for (const auto& [name, tensor] : tensors) {
    items.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  }
  return items;
}

inline void WriteModel(const std::filesystem::path& path, const Tensors& tensors) {
  SafetensorsWriter writer(path, ItemsOf(tensors));
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

inline Tensors LocalValues(const nn::ModuleBase& module) {
  Tensors values;
  for (const auto& [name, slot] : module.named_slots()) {
    values[name] = local_tensor(slot->persistent()).detach().clone();
  }
  return values;
}

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
    Distribute(net, rank.mesh(mesh_sizes, {"dp", "tp"}), Values(add));
    for (const auto& [name, slot] : net.named_slots()) {
      const at::Tensor& tensor = slot->persistent();
      optimizer.emplace_back(name + ".exp_avg",
                             make_distributed(local_tensor(tensor).detach() * 1000,
                                              sharding_spec(tensor), tensor.sizes().vec()));
      optimizer.emplace_back(name + ".step", at::full({}, 7.0F + static_cast<float>(add)));
    }
  }
  StateDict dict() { return {net, optimizer, {{"samples", 640}}}; }
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

inline Tensors LocalValues(const SavedState& state) {
  return state.local();
}

/// Calls `call`. If `call` throws an Error, expects that the local tensors of `state` (a module or
/// a SavedState) have not changed, and throws the Error again.
template <class State, class Call>
void ExpectUnchangedByError(const State& state, const Call& call) {
  const Tensors before = LocalValues(state);
  try {
    call();
  } catch (const Error&) {
    ExpectEqual(LocalValues(state), before);
    throw;
  }
}

/// Flips one bit in a file: in the byte at index `at`, or in the last byte if `at` is -1.
inline void damage(const std::filesystem::path& path, std::int64_t at = -1) {
  std::string bytes = ReadFile(path);
  bytes[at < 0 ? bytes.size() - 1 : static_cast<std::size_t>(at)] ^= 1;
  WriteFile(path, bytes);
}

/// Saves a checkpoint of a Net on a 2 × 2 mesh, with the parameters Values() + `add`.
inline void SaveStep(const std::filesystem::path& dir, std::int64_t step, int add = 0,
                     const SaveOptions& options = {}) {
  RunRanks(4, [&](Rank& rank) {
    SavedState state(rank, {2, 2}, add);
    save(*rank.world(), dir, step, state.dict(), options);
  });
}

/// Loads the newest checkpoint on one rank. Expects parameters Values() + `add`. Returns its step.
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

/// A handler that collects warnings, for c10::WarningUtils::WarningHandlerGuard.
class HeardWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;
};

}  // namespace tessera::checkpoint
