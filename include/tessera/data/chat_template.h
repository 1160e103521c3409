#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::data {

/// A conversation as a model's tokenizer reads it.
struct ChatText {
  std::string text;
  /// What the assistant says, from which a model learns: begin and end in bytes of the text, in
  /// order.
  std::vector<std::pair<std::size_t, std::size_t>> learnt;
};

/// A model's chat template, in Jinja as `transformers` renders it. Objects are JSON:
/// {"messages": [{"role": "user", "content": "..."}, ...]}, with "tools" where there are some.
/// Immutable.
class ChatTemplate {
 public:
  virtual ~ChatTemplate() = default;
  /// The text of the messages, with what begins the assistant's next turn. Throws Error for what
  /// the template refuses or does that is not implemented, and `origin`: file and line.
  virtual std::string prompt(std::string_view object, const std::string& origin) const = 0;
  /// The text of the messages. {% generation %} in the template marks the assistant's turns.
  /// Without it a turn is what it adds to the text before it, which ends with the turn's beginning.
  /// Also throws Error if these texts don't begin alike, or if the assistant's text is empty.
  virtual ChatText conversation(std::string_view object, const std::string& origin) const = 0;
};
/// Shared by all that render with it.
using ChatTemplatePtr = std::shared_ptr<const ChatTemplate>;

/// The template beside a tokenizer, which is a file or the folder of a model: chat_template.jinja,
/// or else "chat_template" of tokenizer_config.json. nullptr where there is none. Throws Error for
/// one that is wrong.
ChatTemplatePtr open_chat_template(const std::string& tokenizer);

/// Whether a line of JSON Lines is an object with "messages" that are not null. False for what is
/// no JSON.
bool has_messages(std::string_view line);

}  // namespace tessera::data
TESSERA_API_END
