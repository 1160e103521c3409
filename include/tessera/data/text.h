#pragma once

#include <string>
#include <string_view>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::data {

/// The contents of a file. Throws Error if it can't be read.
std::string read_text(const std::string& path);

/// The entropy of a byte given the byte before it, by the counts of this text, in nats per byte:
/// the loss that a perfect bigram model of it would reach. 0 for fewer than two bytes.
double bigram_entropy(std::string_view text);

}  // namespace tessera::data
TESSERA_API_END
