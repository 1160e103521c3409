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
    const std::size_t count = mapping[1], length = mapping[2];
    mapping = mapping.subspan(3);
    for (std::uint32_t i = 0; i < count && length > 0; ++i) {
      visit(code + i, mapping.subspan(i * length, length));
    }
    for (std::uint32_t i = 0; i < count && length == 0; ++i) {
      const std::uint32_t stride = mapping[0], mapped = mapping[1] + i * stride;
      visit(code + i * stride, {&mapped, 1});
    }
    mapping = mapping.subspan(length == 0 ? 2 : count * length);
  }
}

}  // namespace tessera::data
