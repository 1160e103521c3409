#include "unicode/tables.h"

namespace tessera::data {
namespace {

// NOLINTBEGIN(modernize-avoid-c-arrays)
#include "unicode/tables.inc"
// NOLINTEND(modernize-avoid-c-arrays)

}  // namespace

const UnicodeTables kUnicode{kRanges,  kProperties, kCanonical, kCompatible,   kCompositions,
                             kClasses, kLower,      kFolds,     kMultipleFolds};

}  // namespace tessera::data
