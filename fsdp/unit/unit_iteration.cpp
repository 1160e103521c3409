// A unit in the iteration of its root: how the first call of a root finds its units, what begins
// and abandons one, and what is refused before.

#include <c10/core/GradMode.h>

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "agreement/step_agreement.h"
#include "comm/data_mesh.h"
#include "tessera/core/error.h"
#include "tessera/nn/detail/calls.h"
#include "tessera/nn/module.h"
#include "unit/attached_units.h"
#include "unit/module_tree.h"
#include "unit/unit.h"

namespace tessera::fsdp {

namespace {

// If only parts of a model were made units, each rank trains the rest separately, without an error.
// Only the module whose forward was called can see the rest.

/// "'a', 'b', 'c', ...": three show which part of the model it is.
std::string first_of(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < 3; ++i) {
    text += (i == 0 ? "'" : ", '") + names[i] + "'";
  }
  return names.size() > 3 ? text + ", ..." : text;
}

/// Throws Error, naming them, for parameters below `module` that are trained and in no unit, while
/// a unit on `mesh` runs in its forward: their gradients would not be reduced over the ranks. Not
/// for those that Options::ignored names. Not collective, and the same on all ranks.
void refuse_forgotten_parameters(const nn::ModuleBase& module, const DataMesh& mesh) {
  if (mesh.ranks() == 1) {
    return;
  }
  std::unordered_set<nn::SlotPtr> meant;
  for (const std::shared_ptr<Unit>& unit : units_of(module, /*recurse=*/true)) {
    meant.insert(unit->ignored().begin(), unit->ignored().end());
  }
  std::vector<std::string> forgotten;
  nn::visit_modules(
      module,
      [&](const std::string& fqn, const nn::ModuleBase& outside) {
        for (const auto& [name, slot] : outside.slots()) {
          // A parameter with a persistent tensor is tied to one in a unit.
          if (slot->get().requires_grad() && !slot->has_persistent() && !meant.contains(slot)) {
            forgotten.push_back(nn::join_fqn(fqn, name));
          }
        }
      },
      outside_of_units());
  TESSERA_CHECK(forgotten.empty(), "forward of a ", module.name(), " with units of FSDP on ",
                mesh.ranks(), " ranks, but ", forgotten.size(),
                " of its parameters are in none, so that nobody would reduce their gradients (",
                first_of(forgotten), "); apply fully_shard or replicate to the ", module.name(),
                " as well, after its units; freeze them; or, where that is meant, name them in "
                "Options::ignored of a unit");
}

}  // namespace

void Unit::make_iteration() {
  TESSERA_CHECK(modules_.size() == 1,
                "forward of a module that is a unit together with others was called before that "
                "of the root; apply fully_shard to the module that holds them and call that");
  // A unit that is called before it knows a root is the root. If it is not the model's root, that
  // one assigns it to another iteration at its own first call.
  const nn::ModuleBase& root = *modules_.front();
  const std::vector<std::shared_ptr<Unit>> units = units_of(root, true);
  iteration_ = std::make_shared<IterationState>(units);
  const ModuleTree tree(root, false);
  const auto may_be_unused = std::make_shared<std::vector<std::string>>();
  for (const std::shared_ptr<Unit>& unit : units) {
    unit->iteration_ = iteration_;
    unit->groups_.set_comm_context(groups_.shared_comm_context());
    unit->groups_.set_batch_mesh(groups_.mesh());
    // Named by the first of its modules below the root: others may be elsewhere.
    const auto below = std::ranges::find_if(
        unit->modules_, [&](const nn::ModuleBase* module) { return tree.find(module); });
    unit->settings_->label =
        unit->is_root() ? "the root unit" : "unit '" + tree.find(*below)->fqn + "'";
    if (unit->may_be_unused_) {
      may_be_unused->push_back(unit->label());
    }
  }
  for (const std::shared_ptr<Unit>& unit : units) {
    unit->settings_->may_be_unused = may_be_unused;
  }
}

/// `writer`: of the message.
std::string Unit::lost_write(const std::string& writer) const {
  for (const ParameterGroup& group : groups_.groups()) {
    if (const std::string name = group.lost_write(); !name.empty()) {
      return tessera::detail::concat(
          writer, " wrote to its parameter '", name,
          "', which is a gathered copy there, so that the write would be lost; write to "
          "slot->persistent() outside of forward");
    }
  }
  return "";
}

/// In forward and backward the unit itself has shown them.
std::string Unit::write_by_hand() const {
  const bool computes = runs_forward() || phase_ == UnitPhase::kBackward;
  return computes || !shown() ? "" : lost_write("the program, after unshard of " + label() + ",");
}

/// Before anything is gathered: the next gather may free what was written.
void Unit::refuse_write_by_hand() const {
  const std::string lost = write_by_hand();
  TESSERA_CHECK(lost.empty(), lost);
}

void Unit::enter_as_root() {
  if (iteration_ == nullptr) {
    make_iteration();
  }
  if (is_root()) {
    check_outside();
    for (const std::shared_ptr<Unit>& unit : iteration_->units()) {
      unit->refuse_write_by_hand();
    }
    // Prepares every unit, this one too; throws within its own backward.
    follows_abandoned_ = iteration_->begin_forward();
    return;
  }
  refuse_write_by_hand();
  if (!iteration_->is_under_way()) {
    await_compute();
  } else if (!iteration_->runs()) {
    refuse_outdated();
  }
}

void Unit::await_compute() {
  const bool between = iteration_ == nullptr || !iteration_->is_under_way();
  // Outside of an iteration the shards may have been written since the pieces were kept. Within one
  // they may not, and backward needs the pieces.
  if (between) {
    groups_.each(&GatheredState::drop_piece);
  }
  if (between || !iteration_->runs()) {
    std::vector<ParameterGroup*> holding;
    for (ParameterGroup& group : groups()) {
      if (group.gathered().holds_copies()) {
        holding.push_back(&group);
      }
    }
    free_outdated(holding, comm_context());
  }
  groups_.follow_compute();
}

/// No exchange of the ranks, as in await_compute(): a loss may call the unit many times.
void Unit::refuse_outdated() {
  for (const ParameterGroup& group : groups()) {
    TESSERA_CHECK(!group.gathered().holds_copies() || group.gathered().is_current(), "forward of ",
                  label(),
                  ", whose parameters were written since they were gathered for a "
                  "backward that is still to come; run that, or free them by fsdp::reshard");
  }
}

/// Once, in training: an evaluation needs no gradients.
void Unit::check_outside() {
  if (checked_outside_ || !c10::GradMode::is_enabled() || nn::detail::outermost_call() == nullptr) {
    return;
  }
  checked_outside_ = true;
  refuse_forgotten_parameters(*nn::detail::outermost_call(), groups_.mesh());
}

void Unit::abandon_iteration() {
  groups_.each(&GradientState::drop_unsharded);
  groups_.reshard_within_step();
}

void Unit::begin_iteration() {
  // A forward or backward that failed may have left it anywhere.
  to_run_.clear();
  if (phase_ != UnitPhase::kNew) {
    rest();
  }
  prepare();
  gather_on_all_ranks();
}

/// Past the order of gathers, which is of units that all ranks run.
void Unit::gather_on_all_ranks() {
  if (may_be_unused_) {
    groups_.start_unshard();
    groups_.each(&GatheredState::unshard, comm_context());
  }
}

}  // namespace tessera::fsdp
