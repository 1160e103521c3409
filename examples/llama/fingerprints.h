// What a run notes of the files that it reads, and how others differ from them.

#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tessera/data/fingerprint.h"

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

}  // namespace llama
