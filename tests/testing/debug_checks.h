#pragma once

#include <cstdlib>
#include <string>

namespace tessera::testing {

/// TESSERA_DEBUG of this process while it lives. Ranks read it when their threads begin.
class DebugChecks {
 public:
  explicit DebugChecks(const char* value) : outer_(std::getenv(kName)) { setenv(kName, value, 1); }
  DebugChecks(const DebugChecks&) = delete;
  DebugChecks& operator=(const DebugChecks&) = delete;
  ~DebugChecks() { setenv(kName, outer_.c_str(), 1); }

 private:
  static constexpr const char* kName = "TESSERA_DEBUG";
  std::string outer_;  // ranks.cpp sets it to 0 unless the user did
};

}  // namespace tessera::testing
