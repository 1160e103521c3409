#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

/// Text to token ids and back.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::int64_t vocabulary() const = 0;
  virtual std::vector<std::int64_t> encode(std::string_view text) const = 0;
  virtual std::string decode(const std::vector<std::int64_t>& tokens) const = 0;
};
using TokenizerPtr = std::shared_ptr<const Tokenizer>;

/// One token per byte, 256 of them.
TokenizerPtr byte_tokenizer();
/// A SentencePiece model file. Throws Error if it can't be read.
TokenizerPtr sentencepiece_tokenizer(const std::string& path);

/// Whole file as a string. Throws Error if it can't be read.
std::string read_text(const std::string& path);
/// Entropy of a byte given the byte before it, over the text itself, in nats per byte.
double bigram_entropy(std::string_view text);

}  // namespace tessera::data
