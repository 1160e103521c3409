// What a run notes of the files that it reads, and how others differ from them.

#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tessera/data/text.h"

namespace llama {

/// {"name", "bytes", "sampled_crc32c"}.
nlohmann::json to_json(const tessera::data::FileFingerprint& file);
/// A list of these.
nlohmann::json to_json(const std::vector<tessera::data::FileFingerprint>& files);

/// In which way a file is another one than that of a run before, by to_json() of both: "t.bin has 4
/// bytes instead of 3"; "" if it is the same.
std::string file_change(const nlohmann::json& saved, const nlohmann::json& now);
/// The same of lists.
std::string files_change(const nlohmann::json& saved, const nlohmann::json& now);

/// What decides on a tokenizer's ids: to_json() of its file and, as "beside", of those that are
/// read beside it. Null of "", which is a tokenizer of bytes.
nlohmann::json tokenizer_fingerprint(const std::string& tokenizer);
/// In which way a tokenizer is another one than that of a run before; "" if it is the same. What
/// older programs have saved has no "beside", and is compared without.
std::string tokenizer_change(const nlohmann::json& saved, const nlohmann::json& now);

}  // namespace llama
