#include "examples/llama/generate/prompts.h"

#include <fmt/format.h>
#include <algorithm>
#include <iostream>
#include <iterator>
#include <sstream>
#include <utility>

#include "examples/llama/models.h"
#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"
#include "tessera/data/text.h"

namespace llama {
namespace {

PromptText prompt_of_json(const std::string& line, const std::string& place) {
  const tessera::data::JsonTexts prompt =
      tessera::data::json_text_lists(line, {"prompt"}, place).front();
  TESSERA_CHECK(prompt.texts.size() == 1 && !prompt.texts.front().empty(), place,
                ": \"prompt\" is empty or has several texts; write {\"prompt\": \"...\"} in each "
                "line");
  return {prompt.texts.front(), prompt.is_list};
}

std::vector<PromptText> prompts_of(const std::string& file, const std::string& content) {
  const bool is_json = file.ends_with(".jsonl");
  std::istringstream lines(content);
  std::vector<PromptText> prompts;
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    if (line.ends_with('\r')) {
      line.pop_back();
    }
    if (!line.empty()) {
      const std::string place = file + ":" + std::to_string(number);
      prompts.push_back(is_json ? prompt_of_json(line, place) : PromptText{line});
    }
  }
  TESSERA_CHECK(!prompts.empty(), file, " holds no prompt; write one a line");
  return prompts;
}

/// As a file of --prompts.
constexpr const char* kStandardInput = "-";

/// The most that --max-tokens may be for a model that does not say its positions.
constexpr std::int64_t kMostTokensWithoutPositions = 1'000'000;

}  // namespace

std::vector<PromptText> prompt_texts(const GenerateOptions& options, const std::string& input) {
  std::vector<PromptText> prompts;
  for (const std::string& text : options.prompt) {
    prompts.push_back({text});
  }
  for (const std::string& file : options.prompts) {
    const std::vector<PromptText> some = file == kStandardInput
                                             ? prompts_of("standard input", input)
                                             : prompts_of(file, tessera::data::read_text(file));
    prompts.insert(prompts.end(), some.begin(), some.end());
  }
  return prompts;
}

std::string standard_input(const GenerateOptions& options, const tessera::DeviceMesh& mesh) {
  if (std::ranges::find(options.prompts, kStandardInput) == options.prompts.end()) {
    return "";
  }
  std::string text;
  if (mesh.local_rank() == 0) {
    text.assign(std::istreambuf_iterator<char>(std::cin), {});
  }
  return mesh.size() == 1
             ? text
             : tessera::comm::gather_texts(mesh.group(), c10::Device(options.device), text).front();
}

std::string check_positions(const Config& config, std::int64_t longest, std::int64_t max_tokens) {
  const std::int64_t most = config.max_positions;
  // Checked before the cache is allocated. The default of --max-tokens is never refused.
  const std::int64_t limit = most == 0 ? kMostTokensWithoutPositions : most;
  TESSERA_CHECK(max_tokens <= std::max(limit, SamplingOptions{}.max_tokens), "--max-tokens ",
                max_tokens, " is more than the ", limit,
                " positions that the model is made for; take fewer");
  TESSERA_CHECK(most == 0 || longest <= most, "a prompt has ", longest,
                " tokens, but the model is made for ", most, " positions; shorten it");
  if (most == 0 || longest + max_tokens <= most) {
    return "";
  }
  return fmt::format(
      "warning: a text may have {} tokens, but the model is made for {} positions; what "
      "follows them may be poor",
      longest + max_tokens, most);
}

PromptEncoder::PromptEncoder(const std::string& folder, const std::string& file,
                             const Config& config)
    : tokenizer_(open_tokenizer(file, folder, config, /*new_to_text=*/false)),
      special_(read_special_tokens(folder, config)),
      begin_(text_begin(*tokenizer_, special_)) {}

Tokens PromptEncoder::with_begin_tokens(const Tokens& tokens) const {
  Tokens all = begin_;
  all.insert(all.end(), tokens.begin(), tokens.end());
  return all;
}

}  // namespace llama
