#include "tessera/data/token_source.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::data {
namespace {

class MemoryTokens final : public TokenSource {
 public:
  explicit MemoryTokens(std::vector<std::int64_t> tokens) : tokens_(std::move(tokens)) {}

  std::int64_t size() const override { return static_cast<std::int64_t>(tokens_.size()); }

  void read(std::int64_t begin, std::span<std::int64_t> out) const override {
    check_range(begin, static_cast<std::int64_t>(out.size()));
    std::copy_n(tokens_.begin() + begin, out.size(), out.begin());
  }

 private:
  std::vector<std::int64_t> tokens_;
};

}  // namespace

void TokenSource::check_range(std::int64_t begin, std::int64_t count) const {
  TESSERA_CHECK(begin >= 0 && begin <= size() && count <= size() - begin, "tokens [", begin, ", ",
                begin + count, ") were asked for, but there are ", size(),
                ": ask for a range inside them");
}

TokenSourcePtr make_token_source(std::vector<std::int64_t> tokens) {
  return std::make_shared<MemoryTokens>(std::move(tokens));
}

}  // namespace tessera::data
