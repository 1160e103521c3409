#pragma once

#include <string>
#include <vector>

#include "tessera/data/tokenizer.h"

namespace tessera::data {

/// What of a model's tokenizer its file in tiktoken's form leaves out.
struct TiktokenModelParts {
  const char* name;
  std::size_t ranks;  ///< tokens of the file
  const char* pattern;
  std::vector<std::string> (*special_tokens)();  ///< in the order of their ids, behind the others
};

const TiktokenModelParts& parts_of(TiktokenModel model);
/// Told by the number of tokens. Throws Error for another model's.
TiktokenModel tiktoken_model_of(std::size_t ranks);

}  // namespace tessera::data
