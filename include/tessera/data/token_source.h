#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace tessera::data {

/// A sequence of token ids that is read in place. Immutable, so threads may share it.
class TokenSource {
 public:
  virtual ~TokenSource() = default;
  virtual std::int64_t size() const = 0;
  /// Tokens [begin, begin + out.size()) as int64. Throws Error for a range outside [0, size()).
  virtual void read(std::int64_t begin, std::span<std::int64_t> out) const = 0;

 protected:
  /// Throws Error unless [begin, begin + count) lies inside.
  void check_range(std::int64_t begin, std::int64_t count) const;
};
using TokenSourcePtr = std::shared_ptr<const TokenSource>;

/// Tokens in memory.
TokenSourcePtr make_token_source(std::vector<std::int64_t> tokens);

}  // namespace tessera::data
