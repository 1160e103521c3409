#include "tessera/data/chat_template.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <vector>

#include "chat/template.h"
#include "tessera/core/error.h"
#include "tessera/data/tokenizer.h"
#include "tokenizer/files_beside.h"

namespace tessera::data {
namespace {

using chat::Json;

/// The content of a line of a file.
struct Chat {
  Json messages;
  Json tools;
};

/// The whole numbers of more than 64 bits, which JSON's reader makes fractions of.
std::vector<std::string_view> large_numbers(std::string_view json) {
  std::vector<std::string_view> large;
  bool in_text = false;
  for (std::size_t at = 0; at < json.size(); ++at) {
    if (in_text || json[at] == '"') {
      in_text = in_text != (json[at] == '"');
      at += json[at] == '\\' ? 1 : 0;
      continue;
    }
    const std::string_view rest = json.substr(at);
    const std::string_view number = rest.substr(0, rest.find_first_not_of("-+.eE0123456789"));
    constexpr std::size_t kLeastDigits = 19;
    if (number.size() >= kLeastDigits && number.find_first_of(".eE") == std::string::npos &&
        Json::parse(number).is_number_float()) {
      large.push_back(number);
    }
    at += number.empty() ? 0 : number.size() - 1;
  }
  return large;
}

bool holds(const Json& json, const Json& value) {
  return json.is_structured()
             ? std::ranges::any_of(json, [&](const Json& part) { return holds(part, value); })
             : json == value;
}

Chat read_chat(std::string_view object, const std::string& origin) {
  Json json;
  try {
    json = Json::parse(object);
  } catch (const Json::exception& error) {
    fail(origin, ": the line is not JSON (", error.what(), ")");
  }
  const Json messages = json.value("messages", Json());
  TESSERA_CHECK(messages.is_array() && !messages.empty(), origin,
                ": \"messages\" must be a list of at least one message");
  for (const Json& message : messages) {
    TESSERA_CHECK(message.is_object() && message.contains("role") && message["role"].is_string(),
                  origin, ": each of \"messages\" must be an object with a \"role\"");
  }
  const Json tools = json.value("tools", Json());
  for (const std::string_view number : large_numbers(object)) {
    TESSERA_CHECK(!holds(Json::array({messages, tools}), Json::parse(number)), origin,
                  ": the number ", number, " has more than 64 bits; write it as a text");
  }
  return {messages, tools};
}

class JinjaChatTemplate final : public ChatTemplate {
 public:
  explicit JinjaChatTemplate(const FilesBeside& files)
      : template_(*files.chat_template), special_(files.special) {
    if (files.tool_template) {
      tool_template_.emplace(*files.tool_template);
    }
  }

  std::string prompt(std::string_view object, const std::string& origin) const override {
    return rendered(read_chat(object, origin), /*begins_turn=*/true, origin).text;
  }

  ChatText conversation(std::string_view object, const std::string& origin) const override {
    const Chat chat = read_chat(object, origin);
    auto whole = rendered(chat, /*begins_turn=*/false, origin);
    if (!of(chat).marks_generated()) {
      whole.generated = turns(chat, whole.text, origin);
    }
    bool says = false;
    for (const auto& [begin, end] : whole.generated) {
      says = says || begin < end;
    }
    TESSERA_CHECK(says, origin,
                  ": the assistant says nothing in \"messages\", so there is nothing to "
                  "learn; leave the line out");
    return {std::move(whole.text), std::move(whole.generated)};
  }

 private:
  const chat::Template& of(const Chat& chat) const {
    return !chat.tools.is_null() && tool_template_ ? *tool_template_ : template_;
  }

  chat::Template::Result rendered(const Chat& chat, bool begins_turn,
                                  const std::string& origin) const {
    chat::Fields variables{{"messages", chat.messages},
                           {"tools", chat.tools},
                           {"documents", Json()},
                           {"add_generation_prompt", Json(begins_turn)}};
    for (const auto& [name, text] : special_) {
      variables.emplace(name, Json(text));
    }
    try {
      return of(chat).render(std::move(variables));
    } catch (const Error& error) {
      fail(origin, ": the model's chat template can't render the messages: ", error.what());
    }
  }

  /// Up to what begins the assistant's next turn. Many templates look at the first message.
  std::string text_before_turn(const Chat& chat, const std::string& origin) const {
    try {
      return rendered(chat, /*begins_turn=*/true, origin).text;
    } catch (const Error&) {
      TESSERA_CHECK(!chat.messages.empty(), origin,
                    ": the first message is the assistant's, and the model's chat template writes "
                    "no text without messages, so where the turn begins is not known; begin with a "
                    "user's message, or use a template that marks turns by {% generation %}");
      throw;
    }
  }

  /// A text may be that of fewer messages if all texts begin alike.
  std::vector<std::pair<std::size_t, std::size_t>> turns(const Chat& chat, const std::string& whole,
                                                         const std::string& origin) const {
    std::vector<std::pair<std::size_t, std::size_t>> learnt;
    Chat some{Json::array(), chat.tools};
    for (const Json& message : chat.messages) {
      if (message["role"] != "assistant") {
        some.messages.push_back(message);
        continue;
      }
      const std::string before = text_before_turn(some, origin);
      some.messages.push_back(message);
      const std::string with = rendered(some, /*begins_turn=*/false, origin).text;
      TESSERA_CHECK(
          with.starts_with(before) && whole.starts_with(with), origin,
          ": by the model's chat template the text up to the assistant's turn ", learnt.size() + 1,
          " is not how the whole begins, so its turns can't be told apart; use a template "
          "that marks them by {% generation %}");
      learnt.emplace_back(before.size(), with.size());
    }
    return learnt;
  }

  chat::Template template_;
  std::optional<chat::Template> tool_template_;
  std::map<std::string, std::string> special_;
};

}  // namespace

ChatTemplatePtr open_chat_template(const std::string& tokenizer) {
  const FilesBeside files = read_files_beside(tokenizer_files(tokenizer).front());
  if (!files.chat_template) {
    return nullptr;
  }
  try {
    return std::make_shared<JinjaChatTemplate>(files);
  } catch (const Error& error) {
    fail("the chat template beside the tokenizer '", tokenizer, "': ", error.what());
  }
}

bool has_messages(std::string_view line) {
  if (line.find("\"messages\"") == std::string_view::npos) {
    return false;
  }
  const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  return json.is_object() && !json.value("messages", Json()).is_null();
}

}  // namespace tessera::data
