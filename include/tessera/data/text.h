#pragma once

#include <string>
#include <string_view>

namespace tessera::data {

/// Whole file as a string. Throws Error if it can't be read.
std::string read_text(const std::string& path);

/// Entropy of a byte given the byte before it, by the text's own counts, in nats per byte. It is
/// what a perfect bigram model of this text would reach; 0 for fewer than two bytes.
double bigram_entropy(std::string_view text);

}  // namespace tessera::data
