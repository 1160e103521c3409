#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::data {

/// A sequence of token ids that is read in place. Immutable, so threads may share it.
class TokenSource {
 public:
  virtual ~TokenSource() = default;
  /// The number of tokens.
  virtual std::int64_t size() const = 0;
  /// Writes tokens [begin, begin + out.size()) to `out`. Throws Error for a range outside [0,
  /// size()).
  virtual void read(std::int64_t begin, std::span<std::int64_t> out) const = 0;

 protected:
  /// Throws Error unless [begin, begin + count) is inside [0, size()).
  void check_range(std::int64_t begin, std::int64_t count) const;
};
/// Shared by the loaders that read it.
using TokenSourcePtr = std::shared_ptr<const TokenSource>;

/// A copy of tokens in memory, in 1, 2, 4 or 8 bytes each, as the largest needs.
TokenSourcePtr make_token_source(const std::vector<std::int64_t>& tokens);

}  // namespace tessera::data
TESSERA_API_END
