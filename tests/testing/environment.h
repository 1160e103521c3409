#pragma once

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

namespace tessera::testing {

/// While the object exists, an environment variable of this process has another value. When the
/// object is constructed or destroyed, no other thread may read the environment.
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

/// Sets TESSERA_DEBUG. A rank reads this variable when its thread starts.
class DebugChecks : public ScopedVariable {
 public:
  explicit DebugChecks(const char* value) : ScopedVariable("TESSERA_DEBUG", value) {}
};

/// Sets whether new Gloo groups on one host use shared memory.
class SharedMemory : public ScopedVariable {
 public:
  explicit SharedMemory(bool used) : ScopedVariable("TESSERA_SHM", used ? "1" : "0") {}
};

}  // namespace tessera::testing
