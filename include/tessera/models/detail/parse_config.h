#pragma once

#include <string>

#include "tessera/export.h"
#include "tessera/models/llama_config.h"

TESSERA_API_BEGIN
namespace tessera::models {

/// Reads the text of a config.json, and throws the errors of read_config(). `origin`: the name of
/// the text in error messages.
LlamaConfig parse_config(const std::string& text, const std::string& origin);

}  // namespace tessera::models
TESSERA_API_END
