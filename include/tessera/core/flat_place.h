#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/core/layout_math.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Which elements of a global tensor a coordinate has.
struct FlatPlace {
  std::vector<std::int64_t> sizes;  ///< global
  std::vector<Box> boxes;           ///< as owned_boxes() lists them
  friend bool operator==(const FlatPlace&, const FlatPlace&) = default;
};

/// `place` as a list of integers, as an operator can take it (ShardingRule::PlaceArgument): the
/// sizes, then the global offset, the local offset and the sizes of each box. Pure.
std::vector<std::int64_t> flat_place(const FlatPlace& place);
/// The same back, of a tensor of `ndim` dimensions. Throws Error for a list of another length.
FlatPlace read_flat_place(std::span<const std::int64_t> numbers, std::size_t ndim);

}  // namespace tessera
TESSERA_API_END
