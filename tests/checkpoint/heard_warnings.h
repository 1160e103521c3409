#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace tessera::checkpoint {

/// Collects the warnings of a scope. Install it with a c10::WarningUtils::WarningHandlerGuard.
class HeardWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;
};

}  // namespace tessera::checkpoint
