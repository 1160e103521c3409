#include <algorithm>
#include <cmath>
#include <cstddef>
#include <exception>
#include <string>

#include "objects.h"
#include "tessera/core/detail/strict_json.h"
#include "tessera/core/error.h"
#include "tessera/nn/fqn_pattern.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

/// The limits of a saved state: the maximum depth of a manifest minus the levels above a state.
constexpr JsonLimits kStateLimits{.depth = 29};

std::string text_of(const json& state) {
  return state.dump(-1, ' ', false, json::error_handler_t::replace);
}

bool survives_text(const json& state) {
  const json object = {{"state", state}};  // the parser accepts only objects
  try {
    return detail::parse_strict_json(text_of(object), kStateLimits) == object;
  } catch (const Error&) {
    return false;
  }
}

/// The JSON path of the first number that is NaN or infinite: "/loss/0"; "" if there is none.
std::string path_of_nonfinite(const json& state) {
  // `flat` is a named variable, because items() does not extend the lifetime of a temporary.
  const json flat = state.flatten();
  for (const auto& [path, value] : flat.items()) {
    if (value.is_number_float() && !std::isfinite(value.get<double>())) {
      return path.empty() ? "/" : path;
    }
  }
  return "";
}

template <class Object>
json checked_state(const std::string& name, const Object& object) {
  json state = object.state_dict();
  check_storable(state, "the state of '" + name + "'");
  return state;
}

bool matches_any(const std::vector<std::string>& patterns, const std::string& name) {
  return std::ranges::any_of(
      patterns, [&name](const std::string& pattern) { return nn::matches_fqn(pattern, name); });
}

/// Adds to `report` which of `names` are missing in `saved`, an object whose keys are names, and
/// which keys of `saved` are unexpected.
void compare(const json& saved, const std::set<std::string>& names, const LoadOptions& options,
             LoadReport& report) {
  for (const std::string& name : names) {
    if (!saved.contains(name) && !is_excluded(name, options)) {
      report.missing.push_back(name);
    }
  }
  for (const auto& [name, state] : saved.items()) {
    if (!names.contains(name) && !is_excluded(name, options)) {
      report.unexpected.push_back(name);
    }
  }
}

/// Adds the names of all tensors and objects in the step and in the state to `names`.
void add_all_names(const Manifest& manifest, const StateDict& state, std::set<std::string>& names) {
  const auto add = [&names](auto&& named) {
    for (const auto& [name, unused] : named) {
      names.insert(name);
    }
  };
  add(manifest.tensors);
  for (const auto& [name, tensor] : manifest.tensors) {
    names.insert(tensor.tied.begin(), tensor.tied.end());
  }
  add(manifest.stateful.items());
  add(manifest.rank_states.items());
  add(manifest.dropout_calls.items());
  add(dropout_calls(state.model).items());
  add(state.stateful);
  add(state.rank_states);
}

/// Loads an object. If loading fails, the error message names the object.
template <class Object, class Load>
void load_object(const std::string& name, Object& object, const json& saved, const Load& load) {
  try {
    load(object, saved);
  } catch (const std::exception& error) {
    fail("the state of '", name, "' in the checkpoint cannot be taken: ", error.what(),
         ": load what was saved of it, or exclude it");
  }
}

}  // namespace

std::string names_of_objects(const StateDict& state) {
  std::set<std::string> seen;
  std::string names;
  const auto add = [&](const std::string& name, const char* kind) {
    TESSERA_CHECK(!name.empty() && seen.insert(name).second, "the state has two objects named '",
                  name, "', or one without a name: give each its own name");
    check_storable(name, "the name of an object");
    names += text_of(name) + kind;
  };
  for (const auto& [name, object] : state.stateful) {
    add(name, " of all,");
  }
  for (const auto& [name, object] : state.rank_states) {
    add(name, object->persistent() ? " of each," : " not saved,");
  }
  return names;
}

void check_storable(const json& state, const std::string& what) {
  const std::string nonfinite = path_of_nonfinite(state);
  TESSERA_CHECK(nonfinite.empty(), what, ": the number at '", nonfinite,
                "' is NaN or infinite, which JSON cannot hold: save finite numbers, or a text");
  TESSERA_CHECK(
      survives_text(state), what,
      " would be read as other than it was saved: use finite numbers, texts in UTF-8, and at "
      "most ",
      kStateLimits.depth - 1, " levels");
}

void add_stateful(Manifest& manifest, const StateDict& state) {
  for (const auto& [name, object] : state.stateful) {
    manifest.stateful[name] = checked_state(name, *object);
  }
}

json own_rank_states(const NamedRankStates& objects) {
  json states = json::object();
  for (const auto& [name, object] : objects) {
    if (object->persistent()) {
      states[name] = checked_state(name, *object);
    }
  }
  return states;
}

json rank_state_lists(const std::vector<std::string>& of_ranks) {
  json lists = json::object();
  for (const std::string& text : of_ranks) {
    const json states = json::parse(text);
    for (const auto& [name, state] : states.items()) {
      lists[name].push_back(state);
    }
  }
  return lists;
}

bool is_excluded(const std::string& name, const LoadOptions& options) {
  return matches_any(options.exclude, name);
}

bool is_partial(const std::string& name, const LoadOptions& options) {
  return options.partial || matches_any(options.partial_names, name);
}

void check_exclude(const Manifest& manifest, const StateDict& state, std::set<std::string> names,
                   const std::filesystem::path& folder, const LoadOptions& options) {
  if (options.exclude.empty()) {
    return;
  }
  add_all_names(manifest, state, names);
  for (const std::string& pattern : options.exclude) {
    const bool used = std::ranges::any_of(
        names, [&pattern](const auto& name) { return nn::matches_fqn(pattern, name); });
    TESSERA_CHECK(used || pattern == "optimizer.**", "exclude: '", pattern,
                  "' matches none of the ", names.size(), " names of the checkpoint '",
                  folder.string(), "' and of what is loaded, beginning with '",
                  names.empty() ? "" : *names.begin(), "'; correct or remove it");
  }
}

void compare_stateful(const Manifest& manifest, const StateDict& state, const LoadOptions& options,
                      LoadReport& report) {
  std::set<std::string> names;
  for (const auto& [name, object] : state.stateful) {
    names.insert(name);
  }
  compare(manifest.stateful, names, options, report);
}

void compare_rank_states(const Manifest& manifest, const StateDict& state,
                         const LoadOptions& options, LoadReport& report) {
  std::set<std::string> names;
  for (const auto& [name, object] : state.rank_states) {
    if (object->persistent()) {
      names.insert(name);
    }
  }
  compare(manifest.rank_states, names, options, report);
}

void load_rank_states(const json& lists, const NamedRankStates& objects, const LoadOptions& options,
                      int rank, int world_size) {
  const auto load_own = [&](RankState& object, const json& of_ranks) {
    if (of_ranks.size() == static_cast<std::size_t>(world_size)) {
      object.load_state_dict(of_ranks.at(static_cast<std::size_t>(rank)));
    } else if (rank == 0) {
      object.load_state_dict(object.merged(of_ranks.get<std::vector<json>>()));
    } else {
      object.reset();
    }
  };
  for (const auto& [name, object] : objects) {
    if (is_excluded(name, options)) {
      continue;
    }
    if (object->persistent() && lists.contains(name)) {
      load_object(name, *object, lists.at(name), load_own);
    } else {
      object->reset();
    }
  }
}

void load_objects(const Manifest& manifest, const StateDict& state, const LoadOptions& options,
                  int rank, int world_size) {
  for (const auto& [name, object] : state.stateful) {
    if (manifest.stateful.contains(name) && !is_excluded(name, options)) {
      load_object(name, *object, manifest.stateful.at(name),
                  [](Stateful& each, const json& saved) { each.load_state_dict(saved); });
    }
  }
  load_rank_states(manifest.rank_states, state.rank_states, options, rank, world_size);
}

nlohmann::json dropout_calls(const nn::ModuleBase& module) {
  nlohmann::json calls = nlohmann::json::object();
  nn::visit_modules(module, [&](const std::string& fqn, const nn::ModuleBase& each) {
    if (const auto* dropout = dynamic_cast<const nn::Dropout*>(&each)) {
      calls[fqn] = dropout->calls();
    }
  });
  return calls;
}

void set_dropout_calls(nn::ModuleBase& module, const nlohmann::json& saved,
                       const LoadOptions& options) {
  nn::visit_modules(module, [&](const std::string& fqn, nn::ModuleBase& each) {
    auto* dropout = dynamic_cast<nn::Dropout*>(&each);
    if (dropout != nullptr && saved.contains(fqn) && !is_excluded(fqn, options)) {
      dropout->set_calls(saved.at(fqn));
    }
  });
}

}  // namespace tessera::checkpoint
