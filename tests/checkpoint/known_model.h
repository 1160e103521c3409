#pragma once

// A model with known values of all parameters, for the tests of loading and saving.

#include <filesystem>
#include <map>

#include "tessera/checkpoint/safetensors.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/module.h"
#include "testing/distributed.h"

namespace tessera::checkpoint {

using Tensors = std::map<std::string, at::Tensor>;

/// Sizes that neither 2 nor 4 divide.
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

/// Different numbers for each parameter of a Net.
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

/// The local values of a module's parameters on this rank.
inline Tensors LocalValues(const nn::ModuleBase& module) {
  Tensors values;
  for (const auto& [name, slot] : module.named_slots()) {
    values[name] = local_tensor(slot->persistent()).detach().clone();
  }
  return values;
}

/// Distributes the parameters over the mesh, each with other placements.
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

}  // namespace tessera::checkpoint
