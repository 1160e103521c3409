// Short names for library types, and checks of values that must be equal on all ranks or in a
// resumed run.
#pragma once

#include <c10/core/ScalarType.h>
#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/data/text.h"
#include "tessera/models/llama.h"
#include "tessera/models/parallelize.h"
#include "tessera/models/tokenizer.h"
#include "tessera/tessera.hpp"

namespace llama {

using namespace tessera::models;
using Config = LlamaConfig;

/// The type for the value of a flag: "bf16" or "fp16"; any other value means fp32. The command line
/// has already rejected other names.
inline c10::ScalarType scalar_type(const std::string& name) {
  if (name == "bf16") {
    return c10::kBFloat16;
  }
  return name == "fp16" ? c10::kHalf : c10::kFloat;
}

/// The token ids of a text.
using Tokens = std::vector<std::int64_t>;

/// A host-memory process group of all ranks, for comparisons before the first step. Collective at
/// the first call.
tessera::comm::CommunicatorPtr start_group(tessera::comm::World& world);

/// Throws Error on every rank if ranks have different options (training::check_same_options) or
/// different configurations; the message has the first difference. Call it before any other
/// collective over `world`. Collective.
void check_same_start(tessera::comm::World& world, std::map<std::string, std::string> options,
                      const Config& config);

/// Throws Error on every rank if the texts of a rank differ from the texts of rank 0. Collective.
void check_same_texts(tessera::comm::World& world, const std::vector<Tokens>& texts);

/// A file's fingerprint as JSON: {"name", "bytes", "sampled_crc32c"}.
nlohmann::json to_json(const tessera::data::FileFingerprint& file);
/// A list of file fingerprints, each as {"name", "bytes", "sampled_crc32c"}.
nlohmann::json to_json(const std::vector<tessera::data::FileFingerprint>& files);

/// Describes the first value of `now` that differs from `saved`, and its path:
/// "files["t.bin"].bytes is 4 instead of 3"; "" if they are equal. `at`: the path of both values.
std::string first_difference(const nlohmann::json& saved, const nlohmann::json& now,
                             const std::string& at = "");

/// Removes the JSON field "beside" of a tokenizer from `now` if `saved` lacks this field, because
/// older programs did not save the field.
void adapt_older_tokenizer(const nlohmann::json& saved, nlohmann::json& now);

/// The fingerprint of a tokenizer: to_json() of its file, with its further files as "beside". Null
/// for "", which means the byte tokenizer.
nlohmann::json tokenizer_fingerprint(const std::string& tokenizer);

}  // namespace llama
