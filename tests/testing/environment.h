#pragma once

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

namespace tessera::testing {

/// An environment variable of this process, set while this lives. No other thread may read the
/// environment when it begins or ends.
class ScopedVariable {
 public:
  ScopedVariable(std::string name, const std::string& value) : name_(std::move(name)) {
    if (const char* outer = std::getenv(name_.c_str())) {
      outer_ = outer;
    }
    setenv(name_.c_str(), value.c_str(), /*overwrite=*/1);
  }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;
  ~ScopedVariable() {
    if (outer_) {
      setenv(name_.c_str(), outer_->c_str(), /*overwrite=*/1);
    } else {
      unsetenv(name_.c_str());
    }
  }

 private:
  std::string name_;
  std::optional<std::string> outer_;
};

/// TESSERA_DEBUG. Ranks read it when their threads begin.
class DebugChecks : public ScopedVariable {
 public:
  explicit DebugChecks(const char* value) : ScopedVariable("TESSERA_DEBUG", value) {}
};

/// Whether Gloo's groups of one host use shared memory. Read when a group is made.
class SharedMemory : public ScopedVariable {
 public:
  explicit SharedMemory(bool used) : ScopedVariable("TESSERA_SHM", used ? "1" : "0") {}
};

}  // namespace tessera::testing
