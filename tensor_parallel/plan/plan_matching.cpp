// Finds the modules that a plan's pattern matches, and explains if it matches none, or fewer than
// expected. Stock modules are matched as well, so that the error can say why a pattern for one does
// not work.

#include "plan/plan_matching.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <typeindex>
#include <unordered_set>

#include "tessera/core/error.h"
#include "tessera/nn/fqn_pattern.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::tensor_parallel {
namespace {

struct Match {
  std::string fqn;
  torch::nn::Module* module = nullptr;
};

/// At every place, since a pattern may name any of a shared module's FQNs.
std::vector<Match> find_places(nn::ModuleBase& root, const std::string& pattern) {
  std::vector<Match> places;
  nn::visit_modules(root,
                    [&](const std::string& fqn, torch::nn::Module& module) {
                      if (nn::matches_fqn(pattern, fqn)) {
                        places.push_back({fqn, &module});
                      }
                    },
                    {.every_place = true});
  return places;
}

/// Each module once, at the first of its places.
std::vector<Match> first_places(std::vector<Match> places) {
  std::unordered_set<const torch::nn::Module*> found;
  std::erase_if(places,
                [&found](const Match& place) { return !found.insert(place.module).second; });
  return places;
}

/// The beginning of `pattern` before its last segment: "layers.*.up" -> "layers.*"; "" before the
/// first.
std::string without_last_segment(const std::string& pattern) {
  const std::size_t dot = pattern.rfind('.');
  return dot == std::string::npos ? "" : pattern.substr(0, dot);
}

/// Shortens the pattern from its end until something matches: the message lists the children there.
[[noreturn]] void fail_unmatched(nn::ModuleBase& root, const std::string& pattern) {
  std::string reached = pattern;
  std::vector<Match> parents;
  std::string segment;
  while (parents.empty()) {  // ends at the root, which "" matches
    const std::string shorter = without_last_segment(reached);
    segment = reached.substr(shorter.empty() ? 0 : shorter.size() + 1);
    reached = shorter;
    parents = find_places(root, reached);
  }
  const Match& parent = parents.front();
  fail("parallelize_module: the pattern '", pattern, "' matches no module: '", segment,
       "' is none of the children of ",
       parent.fqn.empty() ? std::string("the root") : "'" + parent.fqn + "'", ", which are [",
       fmt::format("{}", fmt::join(parent.module->named_children().keys(), ", ")),
       "]; correct or remove this entry of the plan");
}

bool is_below(const Match& match, const Match& place) {
  return match.fqn.starts_with(place.fqn + ".");
}

std::type_index class_of(const Match& place) {
  const torch::nn::Module& module = *place.module;
  return typeid(module);
}

/// `prefix`, the beginning of a pattern, matches `places`; `matches` are those of the whole
/// pattern. Throws Error if some of the places have no match below them, though others of the same
/// class do.
void check_all_match(const std::string& pattern, const std::string& prefix,
                     const std::vector<Match>& places, const std::vector<Match>& matches) {
  const auto has_match = [&matches](const Match& place) {
    return std::ranges::any_of(matches, [&](const Match& match) { return is_below(match, place); });
  };
  std::unordered_set<std::type_index> classes;
  std::size_t found = 0;
  std::vector<const Match*> missed;
  for (const Match& place : places) {
    if (has_match(place)) {
      classes.insert(class_of(place));
      ++found;
    } else {
      missed.push_back(&place);
    }
  }
  std::erase_if(missed, [&](const Match* place) { return !classes.contains(class_of(*place)); });
  if (missed.empty()) {
    return;
  }
  const std::string below = pattern.substr(prefix.size() + 1);
  fail(
      "parallelize_module: the pattern '", pattern, "' matches in ", found, " of the ",
      found + missed.size(), " modules of one class that '", prefix, "' stands for, but not in '",
      missed.front()->fqn, "', whose children are [",
      fmt::format("{}", fmt::join(missed.front()->module->named_children().keys(), ", ")),
      "]; correct it, write the names that are meant in the place of the wildcard (as [0-2]), or '",
      "**.", below, "' for all that there are");
}

/// A segment that matches several names; "**" matches any path, and may match nothing.
bool is_wildcard(std::string_view segment) {
  return segment != "**" && segment.find_first_of("*?[") != std::string_view::npos;
}

/// A pattern that matches fewer modules than it suggests would silently leave layers out.
void check_wildcards(nn::ModuleBase& root, const std::string& pattern,
                     const std::vector<Match>& matches) {
  std::size_t begin = 0;
  for (std::size_t dot = pattern.find('.'); dot != std::string::npos;
       dot = pattern.find('.', begin)) {
    const std::string prefix = pattern.substr(0, dot);
    if (is_wildcard(std::string_view(prefix).substr(begin))) {
      check_all_match(pattern, prefix, find_places(root, prefix), matches);
    }
    begin = dot + 1;
  }
}

NamedModule with_hooks(const Match& match) {
  auto* module = dynamic_cast<nn::ModuleBase*>(match.module);
  TESSERA_CHECK(module != nullptr, "parallelize_module: '", match.fqn, "' is a ",
                match.module->name(),
                ", which runs no hooks; use the module of tessera::nn or hold it in nn::Hooked");
  return {match.fqn, module};
}

}  // namespace

std::vector<NamedModule> match_modules(nn::ModuleBase& root, const std::string& pattern) {
  const std::vector<Match> matches = find_places(root, pattern);
  if (matches.empty()) {
    fail_unmatched(root, pattern);
  }
  check_wildcards(root, pattern, matches);
  std::vector<NamedModule> modules;
  for (const Match& match : first_places(matches)) {
    modules.push_back(with_hooks(match));
  }
  return modules;
}

}  // namespace tessera::tensor_parallel
