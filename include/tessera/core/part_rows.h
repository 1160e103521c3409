#pragma once

#include <algorithm>
#include <cstdint>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The rows of a tensor that are one of several tensors in it (a fused weight): one run in each of
/// equal groups of rows.
struct PartRows {
  std::int64_t first = 0;       ///< first row of the run in the first group
  std::int64_t run = 0;         ///< rows of a run
  std::int64_t group_rows = 0;  ///< from one run's begin to the next
  std::int64_t groups = 1;

  /// Calls visit(row, from, rows) for the overlap of rows [first_row, first_row + rows) of the
  /// tensor with this part: rows [from, from + rows) of that block are the part's, from its `row`
  /// on.
  template <class Visit>
  void visit(std::int64_t first_row, std::int64_t rows, const Visit& visit) const {
    for (std::int64_t group = 0; group < groups; ++group) {
      const std::int64_t begin = first + group * group_rows;
      const std::int64_t from = std::max(begin, first_row);
      const std::int64_t to = std::min(begin + run, first_row + rows);
      if (from < to) {
        visit(group * run + from - begin, from - first_row, to - from);
      }
    }
  }
};

}  // namespace tessera
TESSERA_API_END
