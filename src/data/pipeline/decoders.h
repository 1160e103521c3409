#pragma once

#include <memory>
#include <string>
#include <vector>

#include "pipeline/json_field.h"

namespace tessera::data {

/// A step that turns the texts of tokens into the decoded text. Immutable.
class Decoder {
 public:
  virtual ~Decoder() = default;
  virtual void apply(std::vector<std::string>& tokens) const = 0;
};
using Decoders = std::vector<std::unique_ptr<const Decoder>>;

/// The steps of a tokenizer.json's "decoder", in their order. Throws Error for what is not
/// implemented.
Decoders read_decoders(const JsonField& field);

/// Bytes of GPT-2's alphabet.
std::unique_ptr<const Decoder> byte_level_decoder();

}  // namespace tessera::data
