#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/data/chat_template.h"
#include "tessera/data/samples.h"
#include "tessera/data/tokenizer.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::data {

/// How objects become samples.
struct PromptOptions {
  std::string prompt_field = "prompt";
  std::string completion_field = "completion";
  std::vector<std::int64_t> begin = {};  ///< tokens before each prompt
  std::vector<std::int64_t> end = {0};   ///< tokens behind each completion, at least one
  /// Cut samples that are too long at their end, and prompts that leave no room at their beginning.
  /// Chats are cut at their end alone: one whose first turn to learn has no room is refused.
  bool truncate = false;
  ChatTemplatePtr chat = nullptr;  ///< for objects with "messages"
};

/// A line of JSON Lines files.
struct JsonLine {
  std::string text;
  std::string origin;  ///< file and line, for messages
};

/// Returns the next line, and nullopt when there is none any more.
using JsonLines = std::function<std::optional<JsonLine>()>;

/// The objects of JSON Lines, a sample each: the tokens of `begin`, the prompt, the completion and
/// `end`, then the last of `end` repeated up to `sequence` tokens. Targets are the tokens of the
/// completion and `end`. The completion's tokens are those that follow the prompt's in the tokens
/// of both texts together, or where a token would reach over the border, those of the completion by
/// itself. An object with "messages" is what `chat` makes of them, without `begin` and `end`, which
/// the template writes: the assistant's turns are targets, and a token that reaches over a border
/// belongs to the part after it. Reads and tokenizes all at once, passes over blank lines, and
/// keeps the tokens, in 4 bytes each. Throws Error, with file and line, for lines that json_texts()
/// refuses, for a sample of more than `sequence` + 1 tokens, or a prompt that leaves no room for a
/// target, unless they are to be cut, for messages without `chat`, and for lines without objects.
SampleSourcePtr prompt_completions(const JsonLines& lines, const Tokenizer& tokenizer,
                                   std::int64_t sequence, const PromptOptions& options);
/// The same of a file that is not compressed.
SampleSourcePtr prompt_completions(const std::string& file, const Tokenizer& tokenizer,
                                   std::int64_t sequence, const PromptOptions& options);

}  // namespace tessera::data
TESSERA_API_END
