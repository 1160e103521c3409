// load() first compares manifest and file headers with the state, then fills tensors. No rank
// begins to fill tensors before all ranks have ended the comparison.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <c10/core/Device.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <set>

#include "parameters.h"
#include "ranks.h"
#include "step_folder.h"
#include "stored_step.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/agreement.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/comm/world.h"
#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

bool matches_any(const std::vector<std::string>& patterns, const std::string& name) {
  return std::ranges::any_of(
      patterns, [&name](const std::string& pattern) { return nn::matches_fqn(pattern, name); });
}

bool is_excluded(const std::string& name, const LoadOptions& options) {
  return matches_any(options.exclude, name);
}

/// Whether the options allow tensor `name` to be missing, unexpected, or of different sizes.
bool is_partial(const std::string& name, const LoadOptions& options) {
  return matches_any(options.partial, name);
}

bool is_saved(const Stateful&) {
  return true;
}
bool is_saved(const RankState& object) {
  return object.persistent();
}

/// Compares the names of `objects` with the keys of the JSON object `saved`. Adds names that
/// `saved` lacks to `report` as missing, and names that `objects` lacks as unexpected.
template <class Object>
void compare(const json& saved, const std::vector<std::pair<std::string, Object*>>& objects,
             const LoadOptions& options, LoadReport& report) {
  std::set<std::string> names;
  for (const auto& [name, object] : objects) {
    if (is_saved(*object)) {
      names.insert(name);
    }
  }
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

/// Throws Error for a pattern of options.exclude that matches no name in `names`: the pattern is
/// probably mistyped. "optimizer.**" may match nothing.
void check_exclude(const Manifest& manifest, const StateDict& state, std::set<std::string> names,
                   const std::filesystem::path& folder, const LoadOptions& options) {
  if (options.exclude.empty()) {
    return;
  }
  add_all_names(manifest, state, names);
  for (const std::string& pattern : options.exclude) {
    const bool used = std::ranges::any_of(
        names, [&pattern](const auto& name) { return nn::matches_fqn(pattern, name); });
    TESSERA_CHECK(used || pattern == "optimizer.**", "exclude: the pattern '", pattern,
                  "' matches none of the ", names.size(), " names in the checkpoint '",
                  folder.string(), "' and in the state to load (the first name is '",
                  names.empty() ? "" : *names.begin(), "'); correct or remove the pattern");
  }
}

void load_object(const std::string& name, const std::function<void()>& load) {
  try {
    load();
  } catch (const std::exception& error) {
    fail("the state of '", name, "' in the checkpoint cannot be loaded: ", error.what(),
         ": pass the object that was saved as '", name, "', or exclude the name");
  }
}

/// Loads this rank's state into `object`. `of_ranks`: the saved states of all ranks. If the number
/// of ranks has changed, rank 0 loads the merged states.
void load_rank_state(RankState& object, const json& of_ranks, int rank, int world_size) {
  if (of_ranks.size() == static_cast<std::size_t>(world_size)) {
    object.load_state_dict(of_ranks.at(static_cast<std::size_t>(rank)));
  } else if (rank == 0) {
    object.load_state_dict(object.merged(of_ranks.get<std::vector<json>>()));
  } else {
    object.reset();
  }
}

void load_objects(const Manifest& manifest, const StateDict& state, const LoadOptions& options,
                  int rank, int world_size) {
  for (const auto& [name, object] : state.stateful) {
    if (manifest.stateful.contains(name) && !is_excluded(name, options)) {
      const json& saved = manifest.stateful.at(name);
      load_object(name, [&saved, each = object] { each->load_state_dict(saved); });
    }
  }
  for (const auto& [name, object] : state.rank_states) {
    if (is_excluded(name, options)) {
      continue;
    }
    if (object->persistent() && manifest.rank_states.contains(name)) {
      const json& saved = manifest.rank_states.at(name);
      load_object(name, [&saved, each = object, rank, world_size] {
        load_rank_state(*each, saved, rank, world_size);
      });
    } else {
      object->reset();
    }
  }
}

/// Restores the counters that dropout_calls() returned. Counters that the options exclude, or that
/// an older checkpoint lacks, stay unchanged.
void set_dropout_calls(nn::ModuleBase& module, const json& saved, const LoadOptions& options) {
  nn::visit_modules(module, [&](const std::string& fqn, nn::ModuleBase& each) {
    auto* dropout = dynamic_cast<nn::Dropout*>(&each);
    if (dropout != nullptr && saved.contains(fqn) && !is_excluded(fqn, options)) {
      dropout->set_calls(saved.at(fqn));
    }
  });
}

/// Throws Error unless all ranks requested the same load. With different LoadOptions, the ranks
/// would load different tensors.
void check_same_request(comm::World& world, const fs::path& path, const LoadOptions& options) {
  std::int64_t own = 0;
  run_or_fail_on_all(world, [&] {
    const std::string request =
        json{fs::absolute(path).lexically_normal().string(), options.exclude, options.partial}.dump(
            -1, ' ', false, json::error_handler_t::replace);
    own = tessera::detail::crc32c(std::as_bytes(std::span(request)));
  });
  const auto others =
      comm::ranks_that_differ(*all_ranks(world), c10::Device(world.options().device), own);
  TESSERA_CHECK(others.empty(), "ranks ", fmt::format("{}", fmt::join(others, ", ")),
                " passed a different folder, step, exclude or partial than rank 0: pass equal "
                "arguments on all ranks");
}

/// Opens the saved step that rank 0 chooses. Rank 0 broadcasts the manifest, because a network file
/// system can show other ranks an older state of the folder.
StoredStep open_step(comm::World& world, const fs::path& path) {
  std::string folder;
  std::string text;
  // A step that Tessera saved must have checksums; shards from PyTorch need none. Only rank 0 knows
  // the writer, so only rank 0 throws.
  Checksums checksums = Checksums::kOptional;
  run_or_fail_on_all(world, [&] {
    if (world.rank() == 0) {
      folder = find_step(path).string();
      const bool others = has_torch_hf_shards(folder);
      text = others ? to_text(manifest_of_shards(folder)) : read_manifest_text(folder);
      checksums = others ? Checksums::kOptional : Checksums::kRequired;
    }
  });
  const c10::Device device(world.options().device);
  const auto group = all_ranks(world);
  folder = comm::broadcast_text(*group, device, 0, folder);
  text = comm::broadcast_text(*group, device, 0, text);
  std::optional<StoredStep> step;
  run_or_fail_on_all(world, [&] {
    step.emplace(folder, parse_manifest(text, fs::path(folder) / kManifestFile, checksums));
  });
  return std::move(*step);
}

/// A tensor of the model or optimizer, and the name of the stored tensor that fills it.
struct Filling {
  StateEntry entry;
  std::string name;
  /// The other names of a tied parameter; empty unless the checkpoint has separate (untied) tensors
  /// under these names.
  std::vector<std::string> copies;
};

/// Compares a state with a saved step: decides which tensors are filled, and makes the LoadReport.
class Comparison {
 public:
  Comparison(const StoredStep& step, const LoadOptions& options) : step_(step), options_(options) {
    report_.step = step.manifest().step;
    report_.entries = step.manifest().entries;
  }

  void add(const StateEntry& entry) {
    known_.insert(entry.names.begin(), entry.names.end());
    const std::size_t before = fillings_.size();
    if (!is_excluded(entry.names.front(), options_)) {
      find_filling(entry);
    }
    if (entry.is_parameter && fillings_.size() == before) {
      incomplete_.emplace(entry.slot.get(), entry.slot->initialized());
    }
  }

  /// Whether the whole parameter is initialized after the load: false if the load leaves elements
  /// unchanged and the parameter was uninitialized before the load.
  bool will_be_whole(const nn::ParameterSlot& slot) const {
    const auto found = incomplete_.find(&slot);
    return found == incomplete_.end() || found->second;
  }

  /// Throws Error if names, sizes or types do not fit and the options do not allow the difference.
  void finish(const StateDict& state) {
    for (const auto& [name, tensor] : step_.manifest().tensors) {
      const bool known = known_.contains(name) || std::ranges::any_of(tensor.tied, [&](auto& tied) {
                           return known_.contains(tied);
                         });
      if (!known && !is_excluded(name, options_)) {
        report_.unexpected.push_back(name);
      }
    }
    compare(step_.manifest().stateful, state.stateful, options_, report_);
    check_exclude(step_.manifest(), state, known_, step_.folder(), options_);
    Mismatch mismatch;
    mismatch.different = different_;
    mismatch.missing = not_partial(report_.missing);
    mismatch.unexpected = not_partial(report_.unexpected);
    TESSERA_CHECK(mismatch.empty(), "the checkpoint '", step_.folder().string(),
                  "' does not fit the model and optimizer", listed("missing", mismatch.missing),
                  listed("unexpected", mismatch.unexpected),
                  listed("different", mismatch.different),
                  ": pass the model and optimizer that were saved, exclude names, or list names in "
                  "LoadOptions::partial (for example for the state of frozen parameters)");
    compare(step_.manifest().rank_states, state.rank_states, options_, report_);
  }

  const std::vector<Filling>& fillings() const { return fillings_; }
  const LoadReport& report() const { return report_; }

 private:
  std::vector<std::string> not_partial(const std::vector<std::string>& names) const {
    std::vector<std::string> kept;
    std::ranges::copy_if(names, std::back_inserter(kept),
                         [this](const std::string& name) { return !is_partial(name, options_); });
    return kept;
  }

  void find_filling(const StateEntry& entry) {
    const std::vector<std::string> found = names_in_step(entry);
    if (found.empty()) {
      report_.missing.push_back(entry.names.front());
    } else if (std::ranges::all_of(found, [&](const auto& name) { return fits(entry, name); })) {
      fillings_.push_back({entry, found.front(), {found.begin() + 1, found.end()}});
    }
  }

  std::vector<std::string> names_in_step(const StateEntry& entry) const {
    std::vector<std::string> names;
    std::set<const ManifestTensor*> tensors;
    for (const std::string& name : entry.names) {
      const ManifestTensor* tensor = step_.find(name);
      const bool wanted = names.empty() || !is_excluded(name, options_);
      if (tensor != nullptr && wanted && tensors.insert(tensor).second) {
        names.push_back(name);
      }
    }
    return names;
  }

  void note_different(const std::string& name, const std::string& how) {
    if (is_partial(name, options_)) {
      report_.reshaped.push_back(name);
    } else {
      different_.push_back(name + " (" + how + ")");
    }
  }

  bool fits(const StateEntry& entry, const std::string& name) {
    const ManifestTensor& stored = *step_.find(name);
    if (stored.sizes != entry.stored.sizes) {
      note_different(name, fmt::format("checkpoint [{}], here [{}]", fmt::join(stored.sizes, ", "),
                                       fmt::join(entry.stored.sizes, ", ")));
      return false;
    }
    const c10::ScalarType from = find_dtype(stored.dtype)->scalar_type;
    const c10::ScalarType to = entry.tensor.scalar_type();
    if (!is_convertible_type(from, to)) {
      note_different(name, fmt::format("checkpoint {}, here {}", stored.dtype, c10::toString(to)));
      return false;
    }
    return true;
  }

  const StoredStep& step_;
  const LoadOptions& options_;
  LoadReport report_;
  std::vector<std::string> different_;
  std::set<std::string> known_;
  std::vector<Filling> fillings_;
  /// Parameters that the load does not fill completely. The value says whether the parameter was
  /// initialized before the load.
  std::map<const nn::ParameterSlot*, bool> incomplete_;
};

void want_filling(const Filling& filling, StoredStep& step) {
  check_fillable(*filling.entry.slot, filling.name);
  filling.entry.stored.visit_own(
      filling.entry.tensor, [&](std::span<const std::int64_t> offset, const at::Tensor& block) {
        step.want(filling.name, offset, block);
      });
}

/// Whether two stored tensors that fill the same tied parameter have equal values in the blocks
/// that this rank stores.
bool are_equal_here(const Filling& filling, const std::string& copy, StoredStep& step) {
  const c10::ScalarType type = filling.entry.tensor.scalar_type();
  const std::int64_t most = kMostPieceBytes / static_cast<std::int64_t>(sizeof(double));
  bool equal = true;
  filling.entry.stored.visit_own(
      filling.entry.tensor, [&](std::span<const std::int64_t> offset, const at::Tensor& block) {
        for_each_piece(block.sizes(), most, [&](auto from, auto sizes) {
          const std::vector<std::int64_t> at = moved(offset, from);
          equal = equal && at::equal(step.values(filling.name, at, sizes, type),
                                     step.values(copy, at, sizes, type));
        });
      });
  return equal;
}

/// Returns an error message if the saved step has different values for names that are tied in this
/// model; otherwise "".
std::string lost_by_ties(const std::vector<Filling>& fillings, const StoredStep& step) {
  for (const Filling& filling : fillings) {
    for (const std::string& copy : filling.copies) {
      StoredStep reading(step.folder(), step.manifest());
      if (!are_equal_here(filling, copy, reading)) {
        return tessera::detail::concat(
            "'", filling.name, "' and '", copy, "' have different values in the checkpoint '",
            step.folder().string(),
            "', but are one tied parameter of this model: build the model with two parameters (in "
            "config.json: \"tie_word_embeddings\": false), or exclude '",
            copy, "' to load only the first");
      }
    }
  }
  return "";
}

void set_filled(const Comparison& comparison) {
  for (const Filling& filling : comparison.fillings()) {
    if (filling.entry.is_parameter) {
      nn::ParameterSlot& slot = *filling.entry.slot;
      slot.set_initialized(comparison.will_be_whole(slot));
    }
  }
}

/// Marks parameters as uninitialized before their values are loaded. Parameters of which only the
/// optimizer state is loaded are not marked.
void set_unfilled(const std::vector<Filling>& fillings) {
  for (const Filling& filling : fillings) {
    if (filling.entry.is_parameter) {
      filling.entry.slot->set_initialized(false);
    }
  }
}

}  // namespace

LoadReport load(comm::World& world, const fs::path& dir_or_step, const StateDict& state,
                const LoadOptions& options) {
  const comm::CallerScope caller("checkpoint::load");
  const at::NoGradGuard no_grad;
  check_same_request(world, dir_or_step, options);
  StoredStep step = open_step(world, dir_or_step);
  Comparison comparison(step, options);
  run_or_fail_on_all(world, [&] {
    for (const StateEntry& entry : state_entries(state)) {
      comparison.add(entry);
    }
    comparison.finish(state);
    for (const Filling& filling : comparison.fillings()) {
      want_filling(filling, step);
    }
  });
  std::string lost;
  read_or_fail_on_all(world, [&] {
    step.check();
    lost = lost_by_ties(comparison.fillings(), step);
  });
  run_or_fail_on_all(world, [&] { TESSERA_CHECK(lost.empty(), lost); });
  // Objects (Stateful, RankState) are loaded before parameters, so that an error of an object is
  // thrown before any parameter changes.
  run_or_fail_on_all(
      world, [&] { load_objects(step.manifest(), state, options, world.rank(), world.size()); });
  try {
    read_or_fail_on_all(world, [&] { step.read(); });
  } catch (...) {
    set_unfilled(comparison.fillings());
    throw;
  }
  set_filled(comparison);
  set_dropout_calls(state.model, step.manifest().dropout_calls, options);
  return comparison.report();
}

}  // namespace tessera::checkpoint
