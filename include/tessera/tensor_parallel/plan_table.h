#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/trace.h"
#include "tessera/export.h"
#include "tessera/tensor_parallel/styles.h"

TESSERA_API_BEGIN
namespace tessera::tensor_parallel {

/// What a plan makes of a parameter.
struct PlannedParameter {
  std::string name;                       ///< "weight"; of a module below the row's: its FQN there
  std::string placement;                  ///< "Shard(0)"; "plain": the plan leaves it as it is
  std::vector<std::int64_t> sizes;        ///< global
  std::vector<std::int64_t> local_sizes;  ///< on this rank
  std::int64_t bytes = 0;                 ///< on this rank
  std::int64_t smallest_bytes = 0;        ///< the least that any rank has
  std::int64_t largest_bytes = 0;         ///< the most that any rank has
  bool shared = false;                    ///< tied: an earlier row has it as well
};

/// Collectives of one kind and for one reason.
struct PlannedCollective {
  std::string group;       ///< the mesh dimension: "tp"
  std::string collective;  ///< "all_gather"
  bool backward = false;   ///< in a backward, or after it
  std::string reason;      ///< "input [Shard(0)] -> [Replicate()]"
  comm::Traffic traffic;   ///< calls, and bytes of this rank's inputs, as metrics count them
};

/// A style on a module, or the parameters of a module that no entry names.
struct PlanRow {
  std::string fqn;    ///< of the module; "" is the one that the plan is applied to
  std::string style;  ///< ParallelStyle::name(), or "no entry"
  std::vector<PlannedParameter> parameters;
  std::vector<PlannedCollective> collectives;  ///< of the style; empty unless recorded
};

/// What a plan makes of a model, seen from one rank.
struct PlanTable {
  std::string mesh;  ///< "DeviceMesh((tp=2), cpu)"
  int rank = 0;      ///< in the mesh
  std::vector<PlanRow> rows;
  /// Collectives that no style causes: sums of gradients at the end of backward, those of operators
  /// between the styles, and the loss's. Empty unless recorded.
  std::vector<PlannedCollective> elsewhere;
  bool recorded = false;  ///< by record_plan()
};

/// What `plan` would make of `module`: a row for each style on each module, and one for each module
/// with parameters that no entry names, in the module's order. Changes nothing and communicates
/// nothing; parameters may be on the meta device, and the mesh on a comm::fake_world of any size.
/// Throws Error as parallelize_module does, which checks the same.
///
///   const auto mesh = init_device_mesh(comm::fake_world(0, 8), {8}, {"tp"});
///   std::cout << tensor_parallel::check_plan(*model, mesh, plan);
PlanTable check_plan(nn::ModuleBase& module, const DeviceMesh& mesh, const ParallelizePlan& plan);

/// The same with the collectives of a step: applies `plan` to `module`, calls `prepare`, if any,
/// for what follows the plan (fully_shard, a first step, in which ranks may agree on more than
/// later), then `step`, which runs forward and backward, and returns which style caused which of
/// its collectives. For a module on the meta device, with inputs there, and on a mesh of a
/// comm::meta_world, nothing is allocated or sent, and the collectives are those of a rank of the
/// real world; otherwise collective as the step is. The module keeps the plan. Throws Error as
/// parallelize_module does, and what the step throws.
PlanTable record_plan(nn::ModuleBase& module, const DeviceMesh& mesh, const ParallelizePlan& plan,
                      const std::function<void()>& step, const std::function<void()>& prepare = {});

/// record_plan in two parts, for a program that applies plans in one place and makes steps in
/// another.
class PlanRecording {
 public:
  /// Applies `plan` to `module`, which keeps it, before anything else adds hooks there. Throws
  /// Error as parallelize_module does. Not collective.
  PlanRecording(nn::ModuleBase& module, const DeviceMesh& mesh, const ParallelizePlan& plan);
  ~PlanRecording();
  PlanRecording(const PlanRecording&) = delete;
  PlanRecording& operator=(const PlanRecording&) = delete;

  /// The plan's table with the collectives of `step`. Once. Collective as the step is; throws what
  /// it throws.
  PlanTable record(const std::function<void()>& step);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Lines of text: a row's parameters, and below them its collectives. Rows that differ only in a
/// number within their FQN, as those of equal layers do, are one, with "*" and how many they are.
std::string to_string(const PlanTable& table);
/// Writes to_string(table).
std::ostream& operator<<(std::ostream& stream, const PlanTable& table);
/// An object with the names of the structs' members, every row by itself.
std::string to_json(const PlanTable& table);

}  // namespace tessera::tensor_parallel
TESSERA_API_END
