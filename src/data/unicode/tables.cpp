#include "unicode/tables.h"

#include <cstddef>

namespace tessera::data {
namespace {

// NOLINTBEGIN(modernize-avoid-c-arrays)
#include "unicode/tables.inc"
// NOLINTEND(modernize-avoid-c-arrays)

}  // namespace

const UnicodeTables kUnicode{kEdges,   kProperties, kCompositions, kCanonical, kCompatible,
                             kClasses, kLower,      kFolds,        kLongFolds};

void for_each_mapped(
    std::span<const std::uint32_t> mapping,
    const std::function<void(char32_t code, std::span<const std::uint32_t> text)>& visit) {
  char32_t code = 0;
  while (!mapping.empty()) {
    code += mapping[0];
    const std::size_t length = mapping[1];
    if (length > 0) {
      visit(code, mapping.subspan(2, length));
      mapping = mapping.subspan(2 + length);
      continue;
    }
    const std::uint32_t count = mapping[2], stride = mapping[3], first = mapping[4];
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint32_t mapped = first + i * stride;
      visit(code + i * stride, {&mapped, 1});
    }
    mapping = mapping.subspan(5);
  }
}

}  // namespace tessera::data
