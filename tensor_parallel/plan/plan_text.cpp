// The names of modules in messages and tables about plans.

#include "plan/plan_text.h"

#include <algorithm>
#include <cctype>

#include "tessera/core/error.h"

namespace tessera::tensor_parallel {

std::string quoted(const std::string& fqn) {
  return fqn.empty() ? "the root module" : "'" + fqn + "'";
}

std::string pattern_of(const std::string& fqn) {
  std::string pattern;
  std::size_t begin = 0;
  while (begin <= fqn.size()) {
    const std::size_t end = std::min(fqn.find('.', begin), fqn.size());
    const std::string segment = fqn.substr(begin, end - begin);
    const bool number = !segment.empty() && std::ranges::all_of(segment, [](unsigned char c) {
      return std::isdigit(c) != 0;
    });
    pattern += (begin == 0 ? "" : ".") + (number ? "*" : segment);
    begin = end + 1;
  }
  return pattern;
}

}  // namespace tessera::tensor_parallel
