// The library's names for the programs, and what ranks and a resumed run must have alike.
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

/// The type that a flag names: "bf16", "fp16", else fp32. The command line has refused other names.
inline c10::ScalarType scalar_type(const std::string& name) {
  if (name == "bf16") {
    return c10::kBFloat16;
  }
  return name == "fp16" ? c10::kHalf : c10::kFloat;
}

/// Token ids of a text.
using Tokens = std::vector<std::int64_t>;

/// A group of all ranks in the hosts' memory, for comparisons before the first step. Collective at
/// the first call.
tessera::comm::CommunicatorPtr start_group(tessera::comm::World& world);

/// Throws Error on every rank if ranks have different options (training::check_same_options) or
/// different configurations, with the first key that differs. Call it before any other collective
/// over `world`. Collective.
void check_same_start(tessera::comm::World& world, std::map<std::string, std::string> options,
                      const Config& config);

/// Throws Error on every rank if a rank has other texts than rank 0. Collective.
void check_same_texts(tessera::comm::World& world, const std::vector<Tokens>& texts);

/// {"name", "bytes", "sampled_crc32c"}.
nlohmann::json to_json(const tessera::data::FileFingerprint& file);
/// A list of these.
nlohmann::json to_json(const std::vector<tessera::data::FileFingerprint>& files);

/// The first value of `now` that differs from `saved`, and where it is: "files["t.bin"].bytes is 4
/// instead of 3"; "" if they are equal. `at`: the place of both.
std::string first_difference(const nlohmann::json& saved, const nlohmann::json& now,
                             const std::string& at = "");

/// Older programs saved a "tokenizer" without its further files, which are not compared then.
void adapt_older_tokenizer(const nlohmann::json& saved, nlohmann::json& now);

/// The fingerprint of a tokenizer: to_json() of its file and, as "beside", of its further files.
/// Null for "", a tokenizer of bytes.
nlohmann::json tokenizer_fingerprint(const std::string& tokenizer);

}  // namespace llama
