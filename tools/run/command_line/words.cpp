#include "words.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string_view>

namespace tessera::run {
namespace {

// torchrun has both forms of every name.
std::string with_dashes(const std::string& word) {
  const auto equals = std::min(word.find('='), word.size());
  std::string name = word.substr(0, equals);
  if (name.starts_with("--")) {
    std::replace(name.begin(), name.end(), '_', '-');
  }
  return name + word.substr(equals);
}

// Whether the option's value is the next word: not in --name=value, nor in -n3.
bool takes_next(const CLI::App& app, const std::string& word) {
  const CLI::Option* option = app.get_option_no_throw(word);
  return option != nullptr && option->get_expected_max() > 0;
}

}  // namespace

Words split_words(const CLI::App& app, int argc, const char* const* argv) {
  Words words;
  int next = 1;
  for (; next < argc && argv[next][0] == '-' && std::string_view(argv[next]) != "--"; ++next) {
    words.own.push_back(with_dashes(argv[next]));
    if (takes_next(app, words.own.back()) && next + 1 < argc) {
      words.own.emplace_back(argv[++next]);
    }
  }
  if (next < argc && std::string_view(argv[next]) == "--") {
    ++next;
  }
  words.program.assign(argv + next, argv + argc);
  return words;
}

}  // namespace tessera::run
