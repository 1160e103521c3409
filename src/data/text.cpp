// Plain text as training data, for small examples.
#include "tessera/data/text.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "tessera/core/detail/text_faults.h"
#include "tessera/core/error.h"

namespace tessera::data {

/// A folder opens as a stream and fails at the first read only, without a reason.
std::string read_text(const std::string& path) {
  TESSERA_CHECK(!std::filesystem::is_directory(path), "'", path, "' is a folder: give a text file");
  std::ifstream in(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  TESSERA_CHECK(in, "cannot read the text file '", path,
                "': give a file that exists and may be read");
  detail::refuse_lfs_pointer(path, text);
  return text;
}

/// Nats per byte after the first: what a model reaches that has learnt which byte follows which.
/// Examples compare their loss with it.
double bigram_entropy(std::string_view text) {
  if (text.size() < 2) {
    return 0;
  }
  // Counts of (byte, next byte): 512 KB, so not on the stack.
  std::vector<std::array<std::int64_t, 256>> pairs(256);
  for (std::size_t i = 1; i < text.size(); ++i) {
    ++pairs[static_cast<unsigned char>(text[i - 1])][static_cast<unsigned char>(text[i])];
  }
  double nats = 0;
  for (const auto& followers : pairs) {
    std::int64_t total = 0;
    for (const auto count : followers) {
      total += count;
    }
    for (const auto count : followers) {
      // 0 log 0 is 0.
      if (count > 0) {
        nats -= static_cast<double>(count) * std::log(double(count) / double(total));
      }
    }
  }
  return nats / static_cast<double>(text.size() - 1);
}

}  // namespace tessera::data
