#pragma once

#include "bpe/bpe_tokenizer.h"
#include "tokenizer/files_beside.h"

namespace tessera::data {

/// Adds the contents of the files beside a tokenizer to it. Throws Error where they contradict it.
void join_files_beside(BpeTokenizerParts& parts, const FilesBeside& beside);

}  // namespace tessera::data
