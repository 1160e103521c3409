// What the layers of the library record about a parameter.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/core/detail/layout_math.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// The parts of a fused parameter, which files store as separate tensors. The fused module replaces
/// several modules, and each part is the weight of one replaced module. The fused parameter has
/// `groups` groups with equal numbers of rows. Each group has rows of every part, in order.
struct StoredParts {
  /// One part of a fused parameter: the weight of a replaced module.
  struct Part {
    std::string module;     ///< name of the replaced module next to the fused module: "q_proj"
    std::int64_t rows = 0;  ///< number of rows of the part in each group
  };
  std::vector<Part> parts;
  std::int64_t groups = 1;
};

/// A part of a fused parameter, which files store as a separate tensor.
struct NamedRows {
  std::string name;  ///< name of the tensor in the files
  PartRows rows;     ///< rows of the fused parameter that belong to the part
};
/// The parts of the parameter `fqn`: "layers.0.qkv.weight" has the parts "layers.0.q.weight" and so
/// on.
std::vector<NamedRows> rows_of_parts(const std::string& fqn, const StoredParts& stored);

}  // namespace tessera::nn

namespace tessera::nn::detail {

/// Properties of a parameter that the layers of the library record (ParameterSlot::role).
struct SlotRole {
  /// Whether FSDP has gathered the parameter, so that its values are in memory a second time,
  /// unsharded.
  bool gathered = false;
  /// For tensor parallelism: whether the parameter is replicated because no plan has named it. A
  /// later plan may still shard the parameter.
  bool replicated_by_default = false;
  /// Whether the parameter belongs to an adapter (apply_lora). Tables of initialisers skip the
  /// parameters of adapters.
  bool of_adapter = false;
  /// Whether saved sharded checkpoints and state dicts contain the parameter; false for buffers
  /// that are not persistent.
  bool saved = true;
  /// Set if files store the parameter as separate parts. Initialization draws the same numbers for
  /// the parts as for separate parameters.
  std::optional<StoredParts> stored_parts = {};
};

}  // namespace tessera::nn::detail
TESSERA_API_END
