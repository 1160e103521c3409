#pragma once

#include <string>

#include "tessera/data/tokenizer.h"
#include "tokenizer/files_beside.h"

namespace tessera::data {

/// hugging_face_tokenizer() with what is beside the file. Throws Error too where the two contradict
/// each other.
TokenizerPtr json_tokenizer(const std::string& path, const FilesBeside& beside);
/// The same of sentencepiece_tokenizer().
TokenizerPtr sentencepiece_tokenizer(const std::string& path, const FilesBeside& beside);

}  // namespace tessera::data
