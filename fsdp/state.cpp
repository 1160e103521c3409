#include "state.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/fsdp/options.h"

namespace tessera::fsdp {

// The tables of legal transitions, and Phase::enter, the only function that changes a phase.
// Because all of FSDP's control flow passes through Phase::enter, an unexpected order of calls is
// an error that names both phases, and not a wrong gradient.

namespace {

template <class P>
std::string successors_of(P phase) {
  std::string names;
  for (const Transition<P>& transition : legal_transitions<P>()) {
    if (transition.from == phase) {
      names += (names.empty() ? "" : ", ") + std::string(to_string(transition.to));
    }
  }
  return names;
}

}  // namespace

// The causes in the tables are those in docs/fsdp.md; fsdp_test compares them.

template <>
const std::vector<Transition<IterationPhase>>& legal_transitions() {
  using enum IterationPhase;
  static const std::vector<Transition<IterationPhase>> table{
      {kIdle, kForward, "the root's forward begins"},
      {kIdle, kAwaitingBackward,
       "the root's forward ends, and a backward that it ran had ended the iteration"},
      {kIdle, kBackward,
       "backward comes to a unit that was called by itself, to an earlier micro-batch (a "
       "pipeline), "
       "or again (create_graph, retain_graph)"},
      {kForward, kForward, "the root's forward begins after one that failed, or within itself"},
      {kForward, kIdle, "the root's forward ends, no result needs a gradient"},
      {kForward, kAwaitingBackward, "the root's forward ends, a result needs a gradient"},
      {kForward, kBackward, "the root's forward runs a backward"},
      {kAwaitingBackward, kForward,
       "the root's forward begins: no backward came, and the iteration is abandoned"},
      {kAwaitingBackward, kAwaitingBackward,
       "a method of the root ends that called the root's forward"},
      {kAwaitingBackward, kBackward, "backward comes to the first unit"},
      {kBackward, kIdle,
       "backward ends, or with ranks that disagree, or had failed when the root's next forward "
       "begins"},
      {kBackward, kAwaitingBackward,
       "the root's forward ends, and a backward that it ran had failed"},
  };
  return table;
}

template <>
const std::vector<Transition<UnitPhase>>& legal_transitions() {
  using enum UnitPhase;
  static const std::vector<Transition<UnitPhase>> table{
      {kNew, kIdle, "its shards are laid out, when the root's forward begins or it is gathered"},
      {kIdle, kForward, "the first of its modules is called"},
      {kIdle, kBackward,
       "backward comes again: the unit ran more than once, or a graph is kept (retain_graph) or "
       "made (create_graph)"},
      {kForward, kIdle,
       "its modules have run and no result needs a gradient, or its forward failed and the root's "
       "begins"},
      {kForward, kForwardRecorded, "a result needs a gradient"},
      {kForward, kBackward, "a backward runs within its forward, or after that failed"},
      {kForwardRecorded, kIdle, "a later one of its modules failed, and the root's forward begins"},
      {kForwardRecorded, kAwaitingBackward, "its modules have run"},
      {kForwardRecorded, kBackward, "a backward runs between its modules"},
      {kAwaitingBackward, kIdle, "the root's forward begins: the iteration was abandoned"},
      {kAwaitingBackward, kForward, "it is called again"},
      {kAwaitingBackward, kForwardRecorded, "a method ends that called its forward"},
      {kAwaitingBackward, kBackward, "a result's gradient comes, or its forward is recomputed"},
      {kBackward, kIdle,
       "its inputs' gradients have come, backward ends, or backward failed and the root's forward "
       "begins"},
  };
  return table;
}

template <>
const std::vector<Transition<GatherPhase>>& legal_transitions() {
  using enum GatherPhase;
  static const std::vector<Transition<GatherPhase>> table{
      {kSharded, kGathering, "the all-gather starts"},
      {kSharded, kUnsharded, "one rank shards: nothing is gathered"},
      {kGathering, kUnsharded, "the all-gather has been waited for"},
      {kGathering, kSharded, "the all-gather failed, or its unit was freed before it was used"},
      {kUnsharded, kSharded, "the unit is freed"},
  };
  return table;
}

const char* to_string(IterationPhase phase) {
  static constexpr const char* kNames[] = {"kIdle", "kForward", "kAwaitingBackward", "kBackward"};
  return kNames[static_cast<std::size_t>(phase)];
}

const char* to_string(UnitPhase phase) {
  static constexpr const char* kNames[] = {
      "kNew", "kIdle", "kForward", "kForwardRecorded", "kAwaitingBackward", "kBackward"};
  return kNames[static_cast<std::size_t>(phase)];
}

const char* to_string(GatherPhase phase) {
  static constexpr const char* kNames[] = {"kSharded", "kGathering", "kUnsharded"};
  return kNames[static_cast<std::size_t>(phase)];
}

template <class P>
void Phase<P>::enter(P next, const std::string& whose) {
  // The tables have at most 14 rows, so a linear search is cheap compared with a collective.
  const bool legal =
      std::ranges::any_of(legal_transitions<P>(), [&](const Transition<P>& transition) {
        return transition.from == now_ && transition.to == next;
      });
  TESSERA_CHECK(legal, "fully_shard: ", whose, " cannot go from phase ", to_string(now_), " to ",
                to_string(next), ", only to ", successors_of(now_),
                "; call modules and backward in an order that docs/fsdp.md has");
  if (PhaseRecorder* const* recorder = PhaseRecorder::Scope::active()) {
    (*recorder)->changes<P>().push_back({whose, to_string(now_), to_string(next)});
  }
  now_ = next;
}

// Phase::enter is defined in this file, next to the tables, and instantiated for the three phase
// types that exist.
template class Phase<IterationPhase>;
template class Phase<UnitPhase>;
template class Phase<GatherPhase>;

// GatherOrder stores positions instead of a successor for each unit, because a unit may run more
// than once in a forward.

void GatherOrder::begin() {
  running_.clear();
  gathered_.clear();
  follows_ = true;
}

void GatherOrder::gathered(const std::shared_ptr<Unit>& unit) {
  gathered_.push_back(unit);
}

bool GatherOrder::used(const std::shared_ptr<Unit>& unit) {
  if (std::ranges::none_of(gathered_, [&](const auto& each) { return each.lock() == unit; })) {
    return false;
  }
  follows_ = next() == unit;
  running_.push_back(unit);
  return true;
}

std::shared_ptr<Unit> GatherOrder::next() const {
  const bool known = follows_ && running_.size() < last_.size();
  return known ? last_[running_.size()].lock() : nullptr;
}

/// The previous order is kept if this forward gathered nothing: units that stay unsharded between
/// micro-batches are gathered only in the first micro-batch.
void GatherOrder::end() {
  if (!running_.empty()) {
    last_ = std::exchange(running_, {});
  }
  follows_ = false;
}

// to_string(Options): the fields in the order of their declarations.

namespace {

class FieldTexts {
 public:
  void add(const char* name, const std::string& value) {
    texts_.push_back(fmt::format(".{} = {}", name, value));
  }
  void add_type(const char* name, const std::optional<c10::ScalarType>& type) {
    if (type) {
      add(name, c10::toString(*type));
    }
  }
  void add_flag(const char* name, bool value, bool by_default) {
    if (value != by_default) {
      add(name, value ? "true" : "false");
    }
  }
  /// Adds an option that is a function, of which the text shows only whether it is set.
  void add_function(const char* name, bool is_given) {
    if (is_given) {
      add(name, "a function");
    }
  }
  std::string text() const { return fmt::format("{{{}}}", fmt::join(texts_, ", ")); }

 private:
  std::vector<std::string> texts_;
};

std::string text_of(const MixedPrecisionPolicy& policy) {
  const MixedPrecisionPolicy by_default;
  FieldTexts fields;
  fields.add_type("param_dtype", policy.param_dtype);
  fields.add_type("reduce_dtype", policy.reduce_dtype);
  fields.add_type("output_dtype", policy.output_dtype);
  fields.add_flag("cast_forward_inputs", policy.cast_forward_inputs,
                  by_default.cast_forward_inputs);
  fields.add_flag("restore_input_dtype", policy.restore_input_dtype,
                  by_default.restore_input_dtype);
  return fields.text();
}

std::string text_of(const OffloadPolicy& policy) {
  FieldTexts fields;
  fields.add_flag("pin_memory", policy.pin_memory, OffloadPolicy().pin_memory);
  return fields.text();
}

}  // namespace

std::string to_string(const Options& options) {
  const Options by_default;
  FieldTexts fields;
  if (const std::string policy = text_of(options.mp_policy); policy != "{}") {
    fields.add("mp_policy", policy);
  }
  if (options.offload_policy) {
    fields.add("offload_policy", text_of(*options.offload_policy));
  }
  if (options.reshard_after_forward) {
    fields.add("reshard_after_forward", *options.reshard_after_forward ? "true" : "false");
  }
  if (options.post_forward_mesh_size != by_default.post_forward_mesh_size) {
    fields.add("post_forward_mesh_size", std::to_string(options.post_forward_mesh_size));
  }
  fields.add_flag("may_be_unused", options.may_be_unused, by_default.may_be_unused);
  fields.add_function("shard_placement", options.shard_placement != nullptr);
  fields.add_function("parameter_mesh", options.parameter_mesh != nullptr);
  if (!options.ignored.empty()) {
    fields.add("ignored", fmt::format("{} parameter{}", options.ignored.size(),
                                      options.ignored.size() == 1 ? "" : "s"));
  }
  fields.add_flag("allow_mixed_frozen", options.allow_mixed_frozen, by_default.allow_mixed_frozen);
  if (options.bucket_cap_mb != by_default.bucket_cap_mb) {
    fields.add("bucket_cap_mb", std::to_string(options.bucket_cap_mb));
  }
  return fields.text();
}

std::ostream& operator<<(std::ostream& stream, const Options& options) {
  return stream << to_string(options);
}

}  // namespace tessera::fsdp
