#pragma once

#include "bpe/bpe.h"

namespace tessera::data {

/// Merges workspace.ids until no pair of neighbours has a merge: the lowest rank first, of equal
/// ones the leftmost.
void merge_symbols(const MergeTable& merges, BpeWorkspace& workspace);

}  // namespace tessera::data
