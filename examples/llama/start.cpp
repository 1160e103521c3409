// What ranks and a resumed run must have alike.

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

std::string file_change(const nlohmann::json& saved, const nlohmann::json& now) {
  const std::string file = now.at("name").dump();
  if (saved.at("name") != now.at("name")) {
    return fmt::format("{} stands where {} stood", file, saved.at("name").dump());
  }
  if (saved.at("bytes") != now.at("bytes")) {
    return fmt::format("{} has {} bytes instead of {}", file, now.at("bytes").dump(),
                       saved.at("bytes").dump());
  }
  return saved == now ? "" : file + " has other contents";
}

std::string files_change(const nlohmann::json& saved, const nlohmann::json& now) {
  if (saved.size() != now.size()) {
    return fmt::format("there are {} files instead of {}", now.size(), saved.size());
  }
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (std::string change = file_change(saved[i], now[i]); !change.empty()) {
      return change;
    }
  }
  return "";
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

std::string tokenizer_change(const nlohmann::json& saved, const nlohmann::json& now) {
  if (saved.is_null() || now.is_null()) {
    if (saved == now) {
      return "";
    }
    return now.is_null() ? "there is no tokenizer instead of " + saved.at("name").dump()
                         : "there is the tokenizer " + now.at("name").dump() + " instead of none";
  }
  nlohmann::json own = now;
  nlohmann::json own_before = saved;
  own.erase("beside");
  own_before.erase("beside");
  if (const std::string change = file_change(own_before, own); !change.empty()) {
    return "of the tokenizer, " + change;
  }
  if (!saved.contains("beside")) {
    return "";
  }
  const std::string change = files_change(saved.at("beside"), now.at("beside"));
  return change.empty() ? "" : "of the files beside the tokenizer, " + change;
}

}  // namespace llama
