#include "examples/llama/cli.h"

#include <toml++/toml.h>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <numeric>
#include <thread>

#include "tessera/core/error.h"

namespace llama {
namespace {

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substitute = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({substitute, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

/// All long names of the program's options, negated flags included.
std::vector<std::string> long_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back(name);
  }
  return names;
}

[[noreturn]] void unknown(const std::string& what, std::string_view name, const CLI::App& app) {
  tessera::fail("unknown ", what, "; did you mean --", nearest(name, long_names(app)),
                "? (--help lists all)");
}

std::string file_value(const toml::node& node, const std::string& key, const std::string& file) {
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* integer = node.as_integer()) return std::to_string(integer->get());
  if (const auto* real = node.as_floating_point()) {
    std::ostringstream out;
    out.precision(17);
    out << real->get();
    return out.str();
  }
  tessera::fail(file, ": \"", key, "\" must be a string, a number, true or false");
}

/// The file's entries as command-line arguments.
std::vector<std::string> file_arguments(const std::string& file, const CLI::App& app) {
  toml::table table;
  try {
    table = toml::parse_file(file);
  } catch (const toml::parse_error& error) {
    tessera::fail("can't read --config-file ", file, ": ", error.description(), " (line ",
                  error.source().begin.line, ")");
  }
  const std::vector<std::string> names = long_names(app);
  std::vector<std::string> arguments;
  for (const auto& [key_view, node] : table) {
    const std::string key(key_view.str());
    if (std::find(names.begin(), names.end(), key) == names.end()) {
      unknown("name \"" + key + "\" in " + file, key, app);
    }
    if (const auto* flag = node.as_boolean()) {
      arguments.push_back((flag->get() ? "--" : "--no-") + key);
    } else {
      arguments.push_back("--" + key);
      arguments.push_back(file_value(node, key, file));
    }
  }
  return arguments;
}

/// The value of --config-file, or "".
std::string config_file_of(const std::vector<std::string>& arguments) {
  const std::string flag = "--config-file";
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == flag && i + 1 < arguments.size()) return arguments[i + 1];
    if (arguments[i].rfind(flag + "=", 0) == 0) return arguments[i].substr(flag.size() + 1);
  }
  return "";
}

/// Several ranks often fail with the same line. Rank 0 reports at once; the others wait a moment,
/// in which the launcher ends them, so that the line is shown once, and still shown if only they
/// fail.
void let_rank_zero_report_first() {
  const char* rank = std::getenv("RANK");
  if (rank != nullptr && std::string_view(rank) != "0") {
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
}

void report(const char* name, const char* message) {
  let_rank_zero_report_first();
  std::cout << std::flush;
  std::cerr << (std::string(name) + ": " + message + "\n") << std::flush;
}

}  // namespace

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  const auto closer = [&](const std::string& a, const std::string& b) {
    return edit_distance(word, a) < edit_distance(word, b);
  };
  const auto best = std::min_element(candidates.begin(), candidates.end(), closer);
  return best == candidates.end() ? "" : *best;
}

void parse_command_line(CLI::App& app, std::vector<std::string> arguments) {
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  for (CLI::Option* option : app.get_options()) {
    option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  }
  app.allow_extras();
  const std::string file = config_file_of(arguments);
  if (!file.empty()) {
    std::vector<std::string> all = file_arguments(file, app);
    all.insert(all.end(), arguments.begin(), arguments.end());
    arguments = std::move(all);
  }
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants a vector
  try {
    app.parse(arguments);
  } catch (const CLI::CallForHelp&) {
    throw;
  } catch (const CLI::ParseError& error) {
    tessera::fail(error.what(), " (--help lists the flags)");
  }
  if (!app.remaining().empty()) {
    const std::string extra = app.remaining().front();
    unknown((extra.rfind('-', 0) == 0 ? "flag " : "argument ") + extra,
            extra.substr(std::min(extra.find_first_not_of('-'), extra.size())), app);
  }
}

int run_program(const char* name, int argc, char** argv, void (*body)(std::vector<std::string>)) {
  try {
    body(std::vector<std::string>(argv + 1, argv + argc));
    return 0;
  } catch (const CLI::CallForHelp&) {
    return 0;
  } catch (const std::exception& error) {
    report(name, error.what());
    // Peers may be waiting for this rank: end at once, without the teardown of a healthy process.
    std::_Exit(1);
  }
}

}  // namespace llama
