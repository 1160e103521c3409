// Checks of values that must be equal on all ranks, or equal to the values of the run that is
// resumed.

#include "examples/llama/start.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"
#include "tessera/data/tokenizer.h"
#include "tessera/training/checkpointer.h"

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

nlohmann::json to_json(const tessera::data::FileFingerprint& file) {
  return {{"name", file.name}, {"bytes", file.bytes}, {"sampled_crc32c", file.sum}};
}

nlohmann::json to_json(const std::vector<tessera::data::FileFingerprint>& files) {
  nlohmann::json list = nlohmann::json::array();
  for (const tessera::data::FileFingerprint& file : files) {
    list.push_back(to_json(file));
  }
  return list;
}

std::string first_difference(const nlohmann::json& saved, const nlohmann::json& now,
                             const std::string& at) {
  if (saved == now) {
    return "";
  }
  if (saved.is_object() && now.is_object()) {
    nlohmann::json all = saved;
    all.update(now);
    for (const auto& [key, unused] : all.items()) {
      const std::string found =
          first_difference(saved.value(key, nlohmann::json()), now.value(key, nlohmann::json()),
                           at.empty() ? key : at + "." + key);
      if (!found.empty()) {
        return found;
      }
    }
  }
  if (saved.is_array() && now.is_array() && saved.size() == now.size()) {
    for (std::size_t i = 0; i < now.size(); ++i) {
      const bool has_name = now[i].is_object() && now[i].contains("name");
      const std::string index = has_name ? now[i].at("name").dump() : std::to_string(i);
      if (std::string found = first_difference(saved[i], now[i], at + "[" + index + "]");
          !found.empty()) {
        return found;
      }
    }
  }
  if (saved.is_array() && now.is_array() && saved.size() != now.size()) {
    return fmt::format("{} has {} entries instead of {}", at, now.size(), saved.size());
  }
  const auto text = [](const nlohmann::json& value) {
    return value.is_null() ? std::string("left out") : value.dump();
  };
  return fmt::format("{} is {} instead of {}", at, text(now), text(saved));
}

void adapt_older_tokenizer(const nlohmann::json& saved, nlohmann::json& now) {
  const auto has_files_beside = [](const nlohmann::json& record) {
    return record.contains("tokenizer") && record.at("tokenizer").contains("beside");
  };
  if (has_files_beside(now) && saved.contains("tokenizer") && saved.at("tokenizer").is_object() &&
      !has_files_beside(saved)) {
    now.at("tokenizer").erase("beside");
  }
}

nlohmann::json tokenizer_fingerprint(const std::string& tokenizer) {
  if (tokenizer.empty()) {
    return {};
  }
  nlohmann::json files =
      to_json(tessera::data::fingerprints(tessera::data::tokenizer_files(tokenizer)));
  nlohmann::json result = files[0];
  files.erase(0);
  result["beside"] = files;
  return result;
}

}  // namespace llama
