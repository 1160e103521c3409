// A part of a tensor as the integers that an operator takes: schemas know no boxes.
#include "tessera/core/flat_place.h"

#include "tessera/core/error.h"

namespace tessera {
namespace {

using Numbers = std::vector<std::int64_t>;

}  // namespace

std::vector<std::int64_t> flat_place(const FlatPlace& place) {
  Numbers numbers = place.sizes;
  for (const Box& box : place.boxes) {
    for (const Numbers* part : {&box.global_offset, &box.local_offset, &box.sizes}) {
      numbers.insert(numbers.end(), part->begin(), part->end());
    }
  }
  return numbers;
}

FlatPlace read_flat_place(std::span<const std::int64_t> numbers, std::size_t ndim) {
  TESSERA_CHECK(ndim > 0 && numbers.size() >= ndim && (numbers.size() - ndim) % (3 * ndim) == 0,
                "a place of ", numbers.size(), " numbers was given for a tensor of ", ndim,
                " dimensions; it takes one size and three numbers a box of each");
  const auto next = [&numbers, ndim] {
    Numbers part(numbers.begin(), numbers.begin() + static_cast<std::ptrdiff_t>(ndim));
    numbers = numbers.subspan(ndim);
    return part;
  };
  FlatPlace place{next(), {}};
  while (!numbers.empty()) {
    Box& box = place.boxes.emplace_back();
    box.global_offset = next();
    box.local_offset = next();
    box.sizes = next();
  }
  return place;
}

}  // namespace tessera
