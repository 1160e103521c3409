#pragma once

#include "bpe/bpe_tokenizer.h"
#include "tokenizer/files_beside.h"

namespace tessera::data {

/// Adds to a tokenizer what the files beside it say. Throws Error where they contradict it.
void join_files_beside(BpeTokenizerParts& parts, const FilesBeside& beside);

}  // namespace tessera::data
