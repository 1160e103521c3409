#include "examples/llama/fingerprints.h"

#include <fmt/format.h>

#include <cstddef>
#include <nlohmann/json.hpp>

#include "tessera/data/tokenizer.h"

namespace llama {

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
