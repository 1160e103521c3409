// The states of Stateful and RankState objects, and the call counter of each nn::Dropout: the parts
// of a step that are not tensors.

#pragma once

#include <nlohmann/json.hpp>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "manifest.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/communicator.h"
#include "tessera/nn/module.h"

namespace tessera::checkpoint {

/// The names of the saved objects as text, which must be equal on all ranks. Throws Error for a
/// name that is empty or used twice.
std::string names_of_objects(const StateDict& state);

/// Throws Error for JSON that saving and loading would change. `what` names the state in the
/// message.
void check_storable(const nlohmann::json& state, const std::string& what);

/// Adds to a manifest the states of the objects that are equal on all ranks. Throws Error for a
/// state that check_storable() rejects.
void add_stateful(Manifest& manifest, const StateDict& state);
/// The states of this rank that are to be saved, by name. Throws Error for a state that
/// check_storable() rejects.
nlohmann::json own_rank_states(const NamedRankStates& objects);
/// Combines the own_rank_states() texts of all ranks. The result has, for each name, the list of
/// the states of all ranks.
nlohmann::json rank_state_lists(const std::vector<std::string>& of_ranks);

/// Whether options.exclude has a pattern that matches `name`.
bool is_excluded(const std::string& name, const LoadOptions& options);
/// Whether the options allow `name` to be missing, unexpected, or of different sizes.
bool is_partial(const std::string& name, const LoadOptions& options);
/// Throws Error for a pattern of options.exclude that matches no name, because it is probably
/// mistyped. "optimizer.**" is always allowed, because a step may have no optimizer state. `names`:
/// the names of the state's tensors. `folder`: the folder of the step.
void check_exclude(const Manifest& manifest, const StateDict& state, std::set<std::string> names,
                   const std::filesystem::path& folder, const LoadOptions& options);
/// Adds to the report which Stateful objects of the state the manifest lacks, and which Stateful
/// objects of the manifest the state lacks.
void compare_stateful(const Manifest& manifest, const StateDict& state, const LoadOptions& options,
                      LoadReport& report);
/// Adds to the report which RankState objects of the state the manifest lacks, and which RankState
/// objects of the manifest the state lacks.
void compare_rank_states(const Manifest& manifest, const StateDict& state,
                         const LoadOptions& options, LoadReport& report);
/// Loads the states of this rank from the result of rank_state_lists() into the objects, or resets
/// the objects, as RankState describes.
void load_rank_states(const nlohmann::json& lists, const NamedRankStates& objects,
                      const LoadOptions& options, int rank, int world_size);
/// Loads the states in the manifest into all objects of `state`.
void load_objects(const Manifest& manifest, const StateDict& state, const LoadOptions& options,
                  int rank, int world_size);

/// The value of nn::Dropout::calls() for each Dropout in a module, by FQN; an empty object if there
/// is no Dropout.
nlohmann::json dropout_calls(const nn::ModuleBase& module);

/// Restores the counters that dropout_calls() returned. Counters that are excluded, or that `saved`
/// lacks because the checkpoint is older, stay unchanged.
void set_dropout_calls(nn::ModuleBase& module, const nlohmann::json& saved,
                       const LoadOptions& options);

}  // namespace tessera::checkpoint
