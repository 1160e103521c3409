// What a step holds besides tensors: the states of objects, and how often each nn::Dropout was
// called.

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

/// The names of the objects that are saved, for ranks to compare. Throws Error for a name that is
/// empty or used twice.
std::string names_of_objects(const StateDict& state);

/// Throws Error for JSON that would not be read as it was saved. `what`: for the message.
void check_storable(const nlohmann::json& state, const std::string& what);

/// Puts the states of objects that are equal on all ranks into a manifest. Throws Error for a state
/// that is not storable.
void add_stateful(Manifest& manifest, const StateDict& state);
/// This rank's own states that are saved, by name. Throws Error as above.
nlohmann::json own_rank_states(const NamedRankStates& objects);
/// Lists of all ranks' states, by name, from the text of each rank's own.
nlohmann::json rank_state_lists(const std::vector<std::string>& of_ranks);

/// Whether options.exclude names this.
bool is_excluded(const std::string& name, const LoadOptions& options);
/// Whether options let this be missing, unexpected, or of other sizes.
bool is_partial(const std::string& name, const LoadOptions& options);
/// Throws Error for a pattern of options.exclude that leaves nothing out: it is mistyped. That of
/// an optimizer is not: a step may have none. `names`: of the state's tensors. `folder`: of the
/// step.
void check_exclude(const Manifest& manifest, const StateDict& state, std::set<std::string> names,
                   const std::filesystem::path& folder, const LoadOptions& options);
/// Adds to the report which objects the manifest lacks, and which it has that the state lacks.
void compare_stateful(const Manifest& manifest, const StateDict& state, const LoadOptions& options,
                      LoadReport& report);
/// The same for those of each rank's own.
void compare_rank_states(const Manifest& manifest, const StateDict& state,
                         const LoadOptions& options, LoadReport& report);
/// Loads this rank's own states into objects from such lists, as RankState says, or resets them.
void load_rank_states(const nlohmann::json& lists, const NamedRankStates& objects,
                      const LoadOptions& options, int rank, int world_size);
/// Loads the manifest's states into all objects.
void load_objects(const Manifest& manifest, const StateDict& state, const LoadOptions& options,
                  int rank, int world_size);

/// nn::Dropout::calls() of each in a module, by FQN; an empty object where there is none.
nlohmann::json dropout_calls(const nn::ModuleBase& module);

/// Sets the counts to those from dropout_calls(). Counts that `saved` lacks, as older checkpoints
/// do, or that are excluded do not change.
void set_dropout_calls(nn::ModuleBase& module, const nlohmann::json& saved,
                       const LoadOptions& options);

}  // namespace tessera::checkpoint
