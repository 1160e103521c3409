#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera::detail {

/// Pieces of a part that are not used as pieces of the whole would be.
struct MetPieces {
  enum class How : std::uint8_t {
    kTogether,   ///< they were computed with each other
    kReordered,  ///< they were put together in another order
    kAlone,      ///< some are missing
  };
  How how = How::kTogether;
  std::vector<std::int64_t> sizes;  ///< of the part that was cut
  std::int64_t dim = 0;             ///< that was cut
  std::int64_t count = 0;           ///< of equal pieces; 0: of others
  at::Tensor parameter;             ///< whose rows are the part's features; undefined: not found
};

/// The pieces (of chunk, split, slices, select, unbind) from which `tensor` was computed together,
/// or in another order, or without the rest, although the plain tensor that they were cut from is
/// this rank's part along that dimension: the pieces of the whole would be of other elements.
/// Pieces that are put together again (cat, stack) have not met, and what was selected one by one
/// may be alone. nullopt: there are none, or none is known by autograd's graph. Not collective.
std::optional<MetPieces> met_pieces(const at::Tensor& tensor);

}  // namespace tessera::detail
