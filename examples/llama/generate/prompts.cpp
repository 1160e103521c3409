#include "examples/llama/generate/prompts.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "examples/llama/model/text_ends.h"
#include "tessera/core/detail/strict_json.h"
#include "tessera/core/error.h"
#include "tessera/data/text.h"

namespace llama {
namespace {

std::string prompt_of_json(const std::string& line, const std::string& place) {
  try {
    const nlohmann::json json = tessera::detail::parse_strict_json(line, {.depth = 16});
    if (json.contains("prompt") && json.at("prompt").is_string() && json.at("prompt") != "") {
      return json.at("prompt").get<std::string>();
    }
  } catch (const tessera::Error& error) {
    tessera::fail(place, " is not a JSON object: ", error.what());
  }
  tessera::fail(place,
                " has no \"prompt\" that is a text of at least one character; write "
                "{\"prompt\": \"...\"} in each line");
}

std::vector<std::string> prompts_of(const std::string& file, const std::string& content) {
  const bool is_json = file.ends_with(".jsonl");
  std::istringstream lines(content);
  std::vector<std::string> prompts;
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    if (line.ends_with('\r')) {
      line.pop_back();
    }
    if (!line.empty()) {
      const std::string place = file + ", line " + std::to_string(number) + ",";
      prompts.push_back(is_json ? prompt_of_json(line, place) : line);
    }
  }
  TESSERA_CHECK(!prompts.empty(), file, " holds no prompt; write one a line");
  return prompts;
}

}  // namespace

std::vector<std::string> prompt_texts(const GenerateOptions& options, const std::string& input) {
  std::vector<std::string> prompts = options.prompt;
  for (const std::string& file : options.prompts) {
    const std::vector<std::string> some = file == kStandardInput
                                              ? prompts_of("standard input", input)
                                              : prompts_of(file, tessera::data::read_text(file));
    prompts.insert(prompts.end(), some.begin(), some.end());
  }
  return prompts;
}

PromptTokens::PromptTokens(const std::string& folder, const std::string& file, const Config& config)
    : tokenizer_(open_tokenizer(file, folder, config, /*new_to_text=*/false)),
      special_(read_special_tokens(folder, config)),
      begin_(text_begin(*tokenizer_, special_)) {}

Tokens PromptTokens::begin(const Tokens& tokens) const {
  Tokens all = tokens;
  if (begin_) {
    all.insert(all.begin(), *begin_);
  }
  return all;
}

}  // namespace llama
