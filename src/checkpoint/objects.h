// The parts of a step besides tensors: the states of objects, and the call counter of each
// nn::Dropout.

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

/// The names of the saved objects, which must be equal on all ranks. Throws Error for a name that
/// is empty or used twice.
std::string names_of_objects(const StateDict& state);

/// Throws Error for JSON that does not survive saving and loading. `what` names the state in the
/// message.
void check_storable(const nlohmann::json& state, const std::string& what);

/// Adds the states of objects that are equal on all ranks to a manifest. Throws Error for a state
/// that check_storable() rejects.
void add_stateful(Manifest& manifest, const StateDict& state);
/// This rank's states that are to be saved, by name. Throws Error for a state that check_storable()
/// rejects.
nlohmann::json own_rank_states(const NamedRankStates& objects);
/// Combines the text of each rank's own_rank_states() into lists of all ranks' states, by name.
nlohmann::json rank_state_lists(const std::vector<std::string>& of_ranks);

/// Whether options.exclude has a pattern for this name.
bool is_excluded(const std::string& name, const LoadOptions& options);
/// Whether the options allow this name to be missing, unexpected, or of different sizes.
bool is_partial(const std::string& name, const LoadOptions& options);
/// Throws Error for a pattern of options.exclude that matches no name, because it is probably
/// mistyped. "optimizer.**" is always allowed, because a step may have no optimizer state. `names`:
/// the state's tensors. `folder`: the step's folder.
void check_exclude(const Manifest& manifest, const StateDict& state, std::set<std::string> names,
                   const std::filesystem::path& folder, const LoadOptions& options);
/// Adds to the report which Stateful objects the manifest lacks, and which of its objects the state
/// lacks.
void compare_stateful(const Manifest& manifest, const StateDict& state, const LoadOptions& options,
                      LoadReport& report);
/// Adds to the report which RankState objects the manifest lacks, and which of its objects the
/// state lacks.
void compare_rank_states(const Manifest& manifest, const StateDict& state,
                         const LoadOptions& options, LoadReport& report);
/// Loads this rank's states from the lists of rank_state_lists() into the objects, or resets the
/// objects, as RankState describes.
void load_rank_states(const nlohmann::json& lists, const NamedRankStates& objects,
                      const LoadOptions& options, int rank, int world_size);
/// Loads the manifest's states into all objects.
void load_objects(const Manifest& manifest, const StateDict& state, const LoadOptions& options,
                  int rank, int world_size);

/// nn::Dropout::calls() of each Dropout in a module, by FQN; an empty object if there is none.
nlohmann::json dropout_calls(const nn::ModuleBase& module);

/// Restores the counters from dropout_calls(). Counters that are excluded, or that `saved` lacks
/// because the checkpoint is older, are unchanged.
void set_dropout_calls(nn::ModuleBase& module, const nlohmann::json& saved,
                       const LoadOptions& options);

}  // namespace tessera::checkpoint
