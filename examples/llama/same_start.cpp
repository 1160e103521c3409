#include "examples/llama/same_start.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"
#include "tessera/training/same_options.h"

namespace llama {

using namespace tessera;

comm::CommunicatorPtr start_group(comm::World& world) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return world.host_group(ranks, "start");
}

void check_same_start(comm::World& world, std::map<std::string, std::string> options,
                      const Config& config) {
  const auto values = nlohmann::json::parse(config.json);
  for (const auto& [key, value] : values.items()) {
    options["config.json with " + key] = value.dump();
  }
  training::check_same_options(world, options);
}

void check_same_texts(comm::World& world, const std::vector<Tokens>& texts) {
  const std::vector<std::string> all =
      comm::texts_that_differ(*start_group(world), nlohmann::json(texts).dump());
  const auto other = std::ranges::find_if(all, [&](auto& text) { return text != all.front(); });
  TESSERA_CHECK(other == all.end(), "rank ", other - all.begin(),
                " has other texts, as tokens, than rank 0; give all ranks the same files");
}

}  // namespace llama
