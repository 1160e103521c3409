#include "bpe/merge_table.h"

#include <algorithm>
#include <bit>

namespace tessera::data {

MergeTable::MergeTable(const std::vector<Merge>& merges) {
  // At most half full, so that a search ends soon.
  const std::size_t size = std::bit_ceil(std::max<std::size_t>(2 * merges.size(), 16));
  slots_.resize(size);
  mask_ = size - 1;
  shift_ = 64 - std::countr_zero(size);
  for (const Merge& merge : merges) {
    const std::uint64_t key = key_of(merge.left, merge.right);
    std::size_t at = slot_of(key);
    while (slots_[at].key != kEmpty && slots_[at].key != key) {
      at = (at + 1) & mask_;
    }
    slots_[at] = {key, {merge.rank, merge.result}};
  }
}

}  // namespace tessera::data
