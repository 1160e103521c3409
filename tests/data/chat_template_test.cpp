#include "tessera/data/chat_template.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "data/tokenizer/small_tokenizers.h"
#include "tessera/data/tokenizer.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::data {
namespace {

using nlohmann::json;

constexpr const char* kChatMl =
    "{% for message in messages %}<|{{ message.role }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}";
constexpr const char* kTwoTurns =
    R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                     {"role": "user", "content": "c"}, {"role": "assistant", "content": "dd"}]})";

class ChatTemplates : public ::testing::Test {
 protected:
  ChatTemplates() {
    testing::WriteFile(folder_ / "tokenizer.json", testing::ByteLevelJson().dump());
  }

  ChatTemplatePtr Open(const json& chat_template) {
    testing::WriteFile(folder_ / "tokenizer_config.json",
                       json{{"chat_template", chat_template}, {"bos_token", "<s>"}}.dump());
    return open_chat_template(folder_.path());
  }
  std::string Render(const std::string& source) {
    return Open(source)->prompt(R"({"messages": [{"role": "user", "content": "a"}]})", "f:1");
  }

  testing::TemporaryFolder folder_;
};

TEST_F(ChatTemplates, AreFoundWhereTransformersFindsThem) {
  EXPECT_EQ(open_chat_template(folder_.path()), nullptr);
  const char* line = R"({"messages": [{"role": "user", "content": "a"}], "tools": [1]})";
  const json named = {{{"name", "tool_use"}, {"template", "tools"}},
                      {{"name", "default"}, {"template", "{{ bos_token }}"}}};
  EXPECT_EQ(Open(named)->prompt(line, "f:1"), "tools");
  EXPECT_EQ(Open(named)->prompt(R"({"messages": [{"role": "user"}]})", "f:1"), "<s>");
  testing::WriteFile(folder_ / "chat_template.jinja", "of the file\n");
  EXPECT_EQ(Open(named)->prompt(line, "f:1"), "of the file");
}

TEST_F(ChatTemplates, TellTheAssistantsTurnsByTheirPrefixes) {
  const ChatText chat = Open(kChatMl)->conversation(kTwoTurns, "f:1");
  EXPECT_EQ(chat.text, "<|user|>a\n<|assistant|>b\n<|user|>c\n<|assistant|>dd\n");
  ASSERT_EQ(chat.learnt.size(), 2);
  EXPECT_EQ(chat.text.substr(chat.learnt[0].first, 2), "b\n");
  EXPECT_EQ(chat.text.substr(chat.learnt[1].first), "dd\n");
  EXPECT_EQ(chat.learnt[1].second, chat.text.size());
}

TEST_F(ChatTemplates, FindTheAssistantsTurnsByGenerationTags) {
  const auto chat = Open(
      "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
      "{% endgeneration %}{% else %}[{{ m.content }}]{% endif %}{% endfor %}");
  const ChatText text = chat->conversation(kTwoTurns, "f:1");
  EXPECT_EQ(text.text, "[a]b[c]dd");
  EXPECT_EQ(text.learnt, (std::vector<std::pair<std::size_t, std::size_t>>{{3, 4}, {7, 9}}));
}

TEST_F(ChatTemplates, RefuseAmbiguousTurns) {
  // As templates that leave out what an earlier turn has thought.
  const auto chat = Open("{% for m in messages %}{{ m.content if loop.last else '' }}{% endfor %}");
  EXPECT_ERROR(chat->conversation(kTwoTurns, "f:1"), "f:1: by the model's chat template",
               "the assistant's turn 1", "{% generation %}");
  EXPECT_ERROR(
      Open(kChatMl)->conversation(R"({"messages": [{"role": "user", "content": "a"}]})", "f:1"),
      "f:1: the assistant says nothing");
  EXPECT_ERROR(Open(kChatMl)->conversation(R"({"messages": 3})", "f:1"), "must be a list");
  EXPECT_ERROR(Open(kChatMl)->conversation(R"({"messages": [{"content": "a"}]})", "f:1"),
               "\"role\"");
}

TEST_F(ChatTemplates, LearnATurnThatBeginsTheChatWhereTheyCan) {
  const char* line = R"({"messages": [{"role": "assistant", "content": "a"}]})";
  const ChatText chat = Open(kChatMl)->conversation(line, "f:1");
  ASSERT_EQ(chat.learnt.size(), 1);
  EXPECT_EQ(chat.text.substr(chat.learnt[0].first), "a\n");
  EXPECT_ERROR(Open(std::string("{% if messages[0].role == 'system' %}{% endif %}") + kChatMl)
                   ->conversation(line, "f:1"),
               "f:1: the first message is the assistant's", "begin with a user's message");
}

TEST_F(ChatTemplates, SayWhatTheyRefuseAndWhatIsNotImplemented) {
  EXPECT_ERROR(Render("\n{{ raise_exception('roles must alternate') }}"),
               "f:1:", "the chat template says: roles must alternate");
  EXPECT_ERROR(Render("a\n{{ messages | xmlattr }}"),
               "line 2: the filter 'xmlattr' is not implemented");
  EXPECT_ERROR(Open("\n{% include 'a' %}"), "line 2: 'include' is not implemented");
  EXPECT_ERROR(Open("{% if a %}"), "'endif' is missing");
  EXPECT_ERROR(Open("{{ a"), "line 1: a tag does not end");
  EXPECT_ERROR(Open("{{ 1 +"), "a tag does not end");
  EXPECT_ERROR(Open("{{ ) }}"), "line 1: ')' stands where a value is needed");
  EXPECT_ERROR(Render("{{ a.b.c }}"), "line 1: 'b' is asked of 'a', which is undefined");
  EXPECT_ERROR(
      Render("{% for i in range(9999) %}{% for j in range(999) %}{% endfor %}{% endfor %}"),
      "steps");
  EXPECT_ERROR(Open("{{ " + std::string(200, '(') + "1" + std::string(200, ')') + " }}"),
               "too deep");
}

TEST_F(ChatTemplates, ComputeAsPythonDoes) {
  const std::vector<std::pair<const char*, const char*>> cases{
      {"{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2 ** 3 }}", "3 -4 2 3.5 8"},
      {"{{ [1, 2, 3][::-1] }} {{ 'abc'[1:] }} {{ 'abc'[-1] }}", "[3, 2, 1] bc c"},
      {"{{ none }} {{ true and 1 or 2 }} {{ not true is defined }}", "None 1 False"},
      {"{{ {'a': [1, none]} | tojson }} {{ {'a': 'b'} }}", "{\"a\": [1, null]} {'a': 'b'}"},
      {"{% set ns = namespace(n=1) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ "
       "ns.n }}",
       "4"},
      {"{% set x = 1 %}{% for i in [1] %}{% set x = 2 %}{% endfor %}{{ x }}", "1"},
      {"{%- macro m(a, b=2) %}{{ a }}-{{ b }}{% endmacro %}{{ m(1) }} {{ m(1, b=3) }}", "1-2 1-3"},
      {"{% set t %} x {% endset %}[{{ t | trim }}]", "[x]"},
      {"{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}", "a1True"},
      {"{% for i in [1, 2, 3, 4] if i is even %}{{ i }}{% else %}none{% endfor %}", "24"},
      {"{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"},
      {"{{ 'a,b'.split(',') | join('+') }} {{ ' a '.strip() }} {{ 'ab'.startswith(('x', 'a')) }}",
       "a+b a True"},
      {"{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"},
      {"{{ undefined_one is defined }} {{ undefined_one }}.", "False ."},
      {"a \n  {%- if true %} b {% endif -%} \n c", "a b c"},
      {"x\n  {% if true %}\ny\n  {% endif %}\nz\n\n", "x\ny\nz\n"}};
  for (const auto& [source, want] : cases) {
    EXPECT_EQ(Render(source), want) << source;
  }
}

TEST_F(ChatTemplates, ComputeWholeNumbersExactly) {
  const std::vector<std::pair<const char*, const char*>> cases{
      {"{{ 9007199254740993 + 0 }} {{ 9007199254740993 - 1 }}",
       "9007199254740993 9007199254740992"},
      {"{{ 3037000499 * 3037000499 }} {{ 2 ** 62 }}", "9223372030926249001 4611686018427387904"},
      {"{{ 9007199254740993 // 2 }} {{ 9007199254740993 % 10 }}", "4503599627370496 3"},
      {"{{ (-2) ** 63 }} {{ 7 // -2 }} {{ 7 % -3 }} {{ 7 // -1 }}",
       "-9223372036854775808 -4 -2 -7"},
      {"{{ true + 1 }} {{ 2 ** -1 }} {{ 0 ** 999999999 }}", "2 0.5 0"}};
  for (const auto& [source, want] : cases) {
    EXPECT_EQ(Render(source), want) << source;
  }
  EXPECT_ERROR(Render("{{ 2 ** 63 }}"), "line 1: 2 ** 63 has more than 63 bits");
  EXPECT_ERROR(Render("{{ (-2) ** 63 // -1 }}"), "has more than 63 bits");
  EXPECT_ERROR(Render("{{ 10.0 ** 400 }}"), "10.0 ** 400 is no finite number");
}

TEST_F(ChatTemplates, WriteNumbersAsPythonDoes) {
  const auto written = [&](const std::string& numbers) {
    return Open("{{ messages[0].n | tojson }}")
        ->prompt(R"({"messages": [{"role": "a", "n": [)" + numbers + R"(]}], "id": 1)" +
                     std::string(30, '0') + "}",
                 "f:1");
  };
  EXPECT_EQ(
      written("1e15, 1234567890123456.0, 1e16, 1e300, 0.0001, 1e-5, 123456.5, -0.0, 5e-324"),
      "[1000000000000000.0, 1234567890123456.0, 1e+16, 1e+300, 0.0001, 1e-05, 123456.5, -0.0, "
      "5e-324]");
  EXPECT_EQ(written("18446744073709551615, -9223372036854775808"),
            "[18446744073709551615, -9223372036854775808]");
  EXPECT_EQ(written(R"("\"18446744073709551616")"), R"(["\"18446744073709551616"])");
  EXPECT_ERROR(written("18446744073709551616"),
               "f:1: the number 18446744073709551616 has more than 64 bits");
  EXPECT_EQ(Render("{{ 10 ** 15 * 1.5 }} {{ [0.1 + 0.2] }}"),
            "1500000000000000.0 [0.30000000000000004]");
}

TEST_F(ChatTemplates, EscapeWhatPythonDoesNotPrint) {
  EXPECT_EQ(Render("{{ ['a\u200b\x1b\u00a0\x7f\u3000\u00e9\u00ad\U000e0001\U0001f600 '] }}"),
            "['a\\u200b\\x1b\\xa0\\x7f\\u3000\u00e9\\xad\\U000e0001\U0001f600 ']");
}

TEST_F(ChatTemplates, TakeCharactersAsPythonDoes) {
  const std::vector<std::pair<const char*, const char*>> cases{
      {"[{{ '\u00a0a\u3000' | trim }}{{ '\u0085\u2003a\u00a0'.lstrip() }}]", "[aa\u00a0]"},
      {"{{ 'a\u3000b c'.split() }} {{ 'a  b c '.split(none, 1) }}",
       "['a', 'b', 'c'] ['a', 'b c ']"},
      {"{{ '\u00e8x\u00e9'.strip('\u00e9') }}", "\u00e8x"},  // they share a byte
      {"a\u3000{{- 'b' -}}\u00a0c", "abc"},
      {"{{ '\u00e9t\u00e9 don\\'t foo-bar (\u00dfa' | title }}",
       "\u00c9t\u00e9 Don't Foo-Bar (SSa"},
      {"{{ '\u00e9t\u00e9 don\\'t'.title() }} {{ '\u00e9T\u00c9 a'.capitalize() }}",
       "\u00c9t\u00e9 Don'T \u00c9t\u00e9 a"},
      {"{{ '\u00e9\u00df\u044f' | upper }} {{ '\u00c9\u0414' | lower }}",
       "\u00c9SS\u042f \u00e9\u0434"},
      {"{{ '\u0391\u03a3 \u03a3' | lower }}", "\u03b1\u03c2 \u03c3"}};
  for (const auto& [source, want] : cases) {
    EXPECT_EQ(Render(source), want) << source;
  }
  EXPECT_ERROR(Render("{{ '\u0149' | upper }}"), "'upper' of a text with '\u0149'",
               "apply the chat template elsewhere");
}

TEST_F(ChatTemplates, TakeArgumentsAsPythonDoes) {
  const std::vector<std::pair<const char*, const char*>> cases{
      {"{{ 'aaa' | replace('a', 'b', count=2) }} {{ 'aaa'.replace('a', 'b', 1) }}", "bba baa"},
      {"{{ {'b': 1, 'a': {'d': 2, 'c': 3}} | tojson(sort_keys=true, separators=(',', ':')) }}",
       R"({"a":{"c":3,"d":2},"b":1})"},
      {"{{ '\u00e9' | tojson(ensure_ascii=true) }}", R"("\u00e9")"},
      {"{{ ['b', 'A', 'c', 'B'] | sort }}{{ ['b', 'A', 'B'] | sort(case_sensitive=true) }}",
       "['A', 'b', 'B', 'c']['A', 'B', 'b']"},
      {"{{ [{'a': 1, 'b': 1}, {'a': 1, 'b': 2}] | sort(attribute='a', reverse=true) | join(',', "
       "attribute='b') }}",
       "1,2"},
      {"{{ ['a', 'A', 'b'] | unique | list }} {{ true == 1 }} {{ {'a': 1, 'b': 2} == {'b': 2, "
       "'a': 1} }}",
       "['a', 'b'] True True"},
      {"{{ '3.7' | int }} {{ 'x' | int(5) }} {{ '1_000' | int }} {{ 'x' | float(1.5) }}",
       "3 5 1000 1.5"},
      {"{{ [{'a': 1}, {}] | map(attribute='a', default='z') | list }} {{ dict(z=1, a=2) }}",
       "[1, 'z'] {'z': 1, 'a': 2}"}};
  for (const auto& [source, want] : cases) {
    EXPECT_EQ(Render(source), want) << source;
  }
}

TEST_F(ChatTemplates, RefuseArgumentsThatNothingReads) {
  EXPECT_ERROR(Render("{{ 'a' | upper(1) }}"),
               "line 1: the argument 1 of the filter 'upper' is not implemented");
  EXPECT_ERROR(Render("{{ [1] | sort(x=1) }}"), "the argument 'x' of the filter 'sort'");
  EXPECT_ERROR(Render("{{ 'a' | trim('a', chars='b') }}"), "is given twice");
  EXPECT_ERROR(Render("{{ 1 is odd(3) }}"), "the argument 1 of the test 'odd'");
  EXPECT_ERROR(Render("{{ 'abc'.find('c', 1) }}"), "the argument 2 of find()");
  EXPECT_ERROR(Render("{{ 'abc'.startswith('b', 1) }}"), "the argument 2 of startswith()");
  EXPECT_ERROR(Render("{{ {'a': 1}.get('a', default=3) }}"), "the argument 'default' of get()");
  EXPECT_ERROR(Render("{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}"), "the argument 2 of f()");
}

TEST_F(ChatTemplates, AreFoundForToolsBesideTheOthers) {
  const char* tools = R"({"messages": [{"role": "user"}], "tools": [1]})";
  testing::WriteFile(folder_ / "chat_template.jinja", "{{ image_token }}");
  std::filesystem::create_directory(folder_ / "additional_chat_templates");
  testing::WriteFile(folder_ / "additional_chat_templates" / "tool_use.jinja", "tools");
  testing::WriteFile(folder_ / "tokenizer_config.json",
                     R"({"extra_special_tokens": {"image_token": "<x>"}})");
  const auto chat = open_chat_template(folder_.path());
  EXPECT_EQ(chat->prompt(tools, "f:1"), "tools");
  EXPECT_EQ(chat->prompt(R"({"messages": [{"role": "user"}]})", "f:1"), "<x>");
  EXPECT_TRUE(tokenizer_files(folder_.path()).back().ends_with("tool_use.jinja"));
}

}  // namespace
}  // namespace tessera::data
