// The loop of llama_generate: prompts in, tokens out.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "examples/llama/generate/sampling.h"
#include "examples/llama/models.h"
#include "tessera/comm/communicator.h"

namespace llama {

/// How long a generation took.
struct GenerationTimes {
  std::int64_t prompt_tokens = 0;  ///< of all prompts
  double prompt_s = 0;             ///< up to the first token of each text
  std::int64_t tokens = 0;         ///< that followed the first ones
  double decoding_s = 0;
};

/// Is given the tokens of text `index` as they come; returns whether the text goes on.
using TokenSink = std::function<bool(std::size_t index, std::int64_t token)>;

/// Continues `prompts` (at least one token each) as one batch with a key-value cache, each up to
/// one of the tokens `end`, which is not given to `sink`, or options.max_tokens. A text does not
/// depend on the others of the batch but for rounding, and for its draws' place. `ranks`: the group
/// of ranks that compute the model together, nullptr for one; then collective: rank 0 chooses the
/// tokens, and calls `sink`, which the others may leave empty. Throws Error for a prompt without
/// tokens, and what the model throws.
GenerationTimes generate(Llama& model, const std::vector<Tokens>& prompts,
                         const SamplingOptions& options, const Tokens& end, const TokenSink& sink,
                         tessera::comm::Communicator* ranks = nullptr);

}  // namespace llama
