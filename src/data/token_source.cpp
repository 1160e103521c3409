// Shared by all sources of tokens, and the source in memory (text that was encoded, tests).
#include "tessera/data/token_source.h"

#include <algorithm>
#include <limits>

#include "tessera/core/error.h"

namespace tessera::data {
namespace {

template <class Token>
class MemoryTokens final : public TokenSource {
 public:
  explicit MemoryTokens(const std::vector<std::int64_t>& tokens)
      : tokens_(tokens.begin(), tokens.end()) {}

  std::int64_t size() const override { return static_cast<std::int64_t>(tokens_.size()); }

  void read(std::int64_t begin, std::span<std::int64_t> out) const override {
    check_range(begin, static_cast<std::int64_t>(out.size()));
    std::copy_n(tokens_.begin() + begin, out.size(), out.begin());
  }

 private:
  std::vector<Token> tokens_;
};

/// Whether all values from `least` to `most` are those of a type.
template <class Token>
bool fits(std::int64_t least, std::int64_t most) {
  return least >= 0 && most <= std::numeric_limits<Token>::max();
}

}  // namespace

/// The condition has no begin + count, which could overflow.
void TokenSource::check_range(std::int64_t begin, std::int64_t count) const {
  TESSERA_CHECK(begin >= 0 && begin <= size() && count <= size() - begin, "tokens [", begin, ", ",
                begin + count, ") were asked for, but there are ", size(),
                ": ask for a range inside them");
}

/// The smallest type that holds them all: a text of bytes would take eight times its size.
TokenSourcePtr make_token_source(const std::vector<std::int64_t>& tokens) {
  const auto [least, most] = std::ranges::minmax_element(tokens);
  if (tokens.empty() || fits<std::uint8_t>(*least, *most)) {
    return std::make_shared<MemoryTokens<std::uint8_t>>(tokens);
  }
  if (fits<std::uint16_t>(*least, *most)) {
    return std::make_shared<MemoryTokens<std::uint16_t>>(tokens);
  }
  if (fits<std::uint32_t>(*least, *most)) {
    return std::make_shared<MemoryTokens<std::uint32_t>>(tokens);
  }
  return std::make_shared<MemoryTokens<std::int64_t>>(tokens);
}

}  // namespace tessera::data
