// Short names for library types, and a check of values that must be equal on all ranks.
#pragma once

#include <c10/core/ScalarType.h>
#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "tessera/models/llama.h"
#include "tessera/models/parallelize.h"
#include "tessera/models/tokenizer.h"
#include "tessera/tessera.hpp"

namespace llama {

using namespace tessera::models;
using Config = LlamaConfig;

/// Returns the dtype for the value of a dtype flag: "bf16", "fp16", otherwise fp32. The command
/// line's parser has already rejected unknown names.
inline c10::ScalarType scalar_type(const std::string& name) {
  if (name == "bf16") {
    return c10::kBFloat16;
  }
  return name == "fp16" ? c10::kHalf : c10::kFloat;
}

using Tokens = std::vector<std::int64_t>;

/// Returns a process group of all ranks for CPU tensors, for comparisons before the first step. The
/// first call is collective.
inline tessera::comm::CommunicatorPtr start_group(tessera::comm::World& world) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return world.host_group(ranks, "start");
}

/// Throws Error on every rank if ranks have different options (training::check_same_options) or
/// model configurations. Collective over `world`; must be the first collective.
inline void check_same_start(tessera::comm::World& world,
                             std::map<std::string, std::string> options, const Config& config) {
  const auto values = nlohmann::json::parse(config.json);
  for (const auto& [key, value] : values.items()) {
    options["config.json with " + key] = value.dump();
  }
  tessera::training::check_same_options(world, options);
}

}  // namespace llama
