#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "random/local_part.h"
#include "random/pieces.h"
#include "tensor/node_kinds.h"

/// What the parts of an operator's arguments make of its result. `sizes`: the result's.
namespace tessera::detail::parts {

LocalPart unknown(std::string why);

LocalPart viewed(const LocalPart& part, const std::vector<std::int64_t>& sizes);
// Dimensions may count from the end.
LocalPart transposed(LocalPart part, std::int64_t first, std::int64_t second);
LocalPart permuted(const LocalPart& part, const std::vector<std::int64_t>& dims);
LocalPart unsqueezed(LocalPart part, std::int64_t dim);

/// Dimensions that are aligned from the right, as in broadcasting: what is split stays so.
LocalPart aligned(const std::vector<LocalPart>& parts, const std::vector<std::int64_t>& sizes);
/// Whether a dimension that the operator reads across is split.
bool reads_split(const std::vector<LocalPart>& arguments, const std::vector<ReadDim>& reads);

// Of `sizes`; `repeats` as those of Tensor::repeat; each position of `dim` taken as often as the
// others, or any of one that is not split.
LocalPart expanded(LocalPart part, const std::vector<std::int64_t>& sizes);
LocalPart repeated(LocalPart part, const std::vector<std::int64_t>& repeats);
LocalPart selected(LocalPart part, std::int64_t dim, const std::vector<std::int64_t>& sizes);
/// Every few positions.
LocalPart strided(LocalPart part, std::int64_t dim, std::int64_t step,
                  const std::vector<std::int64_t>& sizes);

/// (..., n, k) times (..., k, m).
LocalPart multiplied(const LocalPart& a, const LocalPart& b,
                     const std::vector<std::int64_t>& sizes);
/// The result of an operator that reduces dimensions, none of them split.
LocalPart reduced(LocalPart part, const std::vector<ReadDim>& reads,
                  const std::vector<std::int64_t>& sizes);

/// One of the pieces of `part`. Along a dimension of which this rank has a part, the pieces are
/// what is split, and each is whole; or they are a fused weight's parts, each of them split.
LocalPart cut(LocalPart part, const Piece& piece, LocalParts::Pieces pieces);
/// Of all pieces, in their order, the dimension that was cut; of parts alike, a share of each.
LocalPart put_together(const std::vector<LocalPart>& arguments, const PutTogether& how,
                       const std::vector<std::int64_t>& sizes);

}  // namespace tessera::detail::parts
