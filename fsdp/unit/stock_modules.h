#pragma once

#include <cstdint>

#include "tessera/nn/module.h"

namespace tessera::fsdp {

// What libtorch's modules do that does not go together with FSDP.

/// Throws Error, naming it, for a parameter that gets sparse gradients: reductions take gradients
/// apart by rows, which a sparse one does not have in memory.
void refuse_sparse_gradients(const nn::NamedSlots& parameters);

/// Warns of the first batch norm that is `root` or below it, in no unit yet, and takes statistics
/// of one rank's part of the batch, where the batch is that of several `ranks`.
void warn_of_batch_norm(const nn::ModuleBase& root, std::int64_t ranks);

}  // namespace tessera::fsdp
