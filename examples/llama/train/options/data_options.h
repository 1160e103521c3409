#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "examples/llama/cli.h"

namespace CLI {
class App;
}

namespace llama {

/// The flags of llama_train that say what it learns from; see its --help.
struct DataOptions {
  std::vector<std::string> tokens;  ///< globs
  std::vector<double> weights;      ///< empty, or one for each glob
  std::vector<std::string> jsonl;   ///< globs
  std::vector<std::string> text, eval_text;
  std::string tokenizer;
  std::vector<std::string> eval_tokens;  ///< globs
  std::string prompt_field = "prompt", completion_field = "completion";
  bool truncate = false;
  std::optional<std::uint64_t> shuffle;
  bool document_mask = false;
  std::optional<std::int64_t> eos_token;  ///< ends documents and completions
};

void declare_data(CLI::App& app, DataOptions& options);

/// Those that are for some data only.
std::vector<FlagUse> uses_of_data_flags(const DataOptions& options);

/// What these flags say about one another. `needed`: the run reads data. Throws tessera::Error.
void check_data(const CLI::App& app, const DataOptions& options, bool needed);

}  // namespace llama
