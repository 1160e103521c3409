#pragma once

#include <memory>
#include <string>
#include <vector>

#include "pipeline/json_field.h"

namespace tessera::data {

/// A step that changes a text before it is split. Immutable.
class Normalizer {
 public:
  virtual ~Normalizer() = default;
  /// Changes valid UTF-8 in place.
  virtual void apply(std::string& text) const = 0;
};
using Normalizers = std::vector<std::unique_ptr<const Normalizer>>;

/// The steps of a tokenizer.json's "normalizer", in their order. Throws Error for what is not
/// implemented.
Normalizers read_normalizers(const JsonField& field);

}  // namespace tessera::data
