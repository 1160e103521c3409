// Data that FSDP, tensor parallelism and modules record about parameters, calls and recomputations.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/core/detail/layout_math.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// The parts of a fused parameter; weight files store each part as a tensor. The rows are `groups`
/// groups of equal size. Each group has rows of every part, in order, such as the q, k and v rows
/// of one key-value head.
struct StoredParts {
  /// A part of a fused parameter: the weight of a replaced module.
  struct Part {
    std::string module;     ///< name of the replaced module next to the fused module: "q_proj"
    std::int64_t rows = 0;  ///< number of rows of the part in each group
  };
  std::vector<Part> parts{};
  std::int64_t groups = 1;
  /// Whether the parameter is a stack of matrices, (parts, out, in). Files store each part as one
  /// matrix (out, in). `rows` of each part is then 1.
  bool stacked = false;
  /// Number of trailing segments of the parameter's FQN that do not belong to the fused module's
  /// FQN: 1 for "weight", 2 for "lora_A.weight" of an adapter.
  int depth = 1;
};

/// A part of a fused parameter. Weight files store each part as a separate tensor.
struct NamedRows {
  std::string name;  ///< name of the tensor in the files
  PartRows rows;     ///< the rows of the fused parameter that form this part
};
/// Returns the parts of the parameter `fqn`: "layers.0.qkv.weight" has the parts
/// "layers.0.q.weight" and so on.
std::vector<NamedRows> rows_of_parts(const std::string& fqn, const StoredParts& stored);

/// Whether this thread is recomputing a checkpointed region for backward.
bool is_recomputing();

/// Returns counter++ or, when a checkpointed region is recomputed, the number that the same call
/// returned in forward. For modules whose state changes at every call, such as nn::Dropout.
std::uint64_t replayed_count(std::uint64_t& counter);

/// Counts activation-checkpointed regions, for tests. Several regions can use one CheckpointCounts
/// object. Thread safe.
struct CheckpointCounts {
  std::atomic<std::int64_t> regions = 0;  ///< number of checkpointed forwards that ran
  /// Number of tensors that forward replaced by placeholders.
  std::atomic<std::int64_t> packed = 0;
  std::atomic<std::int64_t> recomputations = 0;  ///< number of regions that backward recomputed
  // With an operator policy only: number of operator calls in forward whose results were saved.
  std::atomic<std::int64_t> kept_operators = 0;
  /// With an operator policy only: number of operator calls that recomputations skipped, because
  /// forward had saved the results.
  std::atomic<std::int64_t> replayed_operators = 0;
  /// With an operator policy only: number of operator calls that recomputations repeated.
  std::atomic<std::int64_t> recomputed_operators = 0;
};

class ModuleBase;

/// Returns the number of data-parallel ranks in the last training forward of this thread; 1 before
/// any. Loss functions use the number to find out whether the inputs are only a part of the batch.
std::int64_t batch_ranks();
void set_batch_ranks(std::int64_t ranks);

/// Whether note_weighing() was called: this thread weighted a loss by the rank's number of rows.
/// FSDP then does not warn when ranks have different numbers of rows.
bool weighs_ranks();
void note_weighing();

/// Which calls of a module run a hook.
enum class HookedCalls : std::uint8_t {
  kForward,
  kEveryMethod,  ///< forward, and methods called through call_method()
};

}  // namespace tessera::nn

namespace tessera::nn::detail {

/// Properties of a parameter that FSDP, tensor parallelism and modules set (ParameterSlot::role).
struct SlotRole {
  /// Whether FSDP has gathered the parameter: unsharded values are in memory in addition to the
  /// shard.
  bool gathered = false;
  /// For tensor parallelism: whether the parameter is replicated because no tensor-parallel plan
  /// has named the parameter. A later plan can still shard the parameter.
  bool replicated_by_default = false;
  /// Whether the parameter belongs to an adapter (apply_lora). Tables of initialisers skip the
  /// parameters of adapters.
  bool of_adapter = false;
  /// Whether saved sharded checkpoints and state dicts contain the parameter; false for buffers
  /// that are not persistent.
  bool saved = true;
  /// The parts of a fused parameter that weight files store separately, if any. Initialization
  /// gives fused and separate parameters the same values.
  std::optional<StoredParts> stored_parts = {};
};

/// A text that is added to the message of an error in a module's call, such as FSDP's "unit
/// 'layers.0'".
struct CallContext {
  std::function<std::string()> text;
};

/// Returns the outermost module that this thread is calling; nullptr if the thread is in no call.
const ModuleBase* outermost_call();

}  // namespace tessera::nn::detail
TESSERA_API_END
