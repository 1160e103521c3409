#pragma once

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

namespace tessera::testing {

/// Sets an environment variable until the object is destroyed. No other thread may read the
/// environment during construction and destruction.
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

/// Sets TESSERA_DEBUG. Only ranks that start while the object exists use the value.
class DebugChecks : public ScopedVariable {
 public:
  explicit DebugChecks(const char* value) : ScopedVariable("TESSERA_DEBUG", value) {}
};

/// Sets TESSERA_SHM, which tells new Gloo groups on one host whether to use shared memory.
class SharedMemory : public ScopedVariable {
 public:
  explicit SharedMemory(bool used) : ScopedVariable("TESSERA_SHM", used ? "1" : "0") {}
};

}  // namespace tessera::testing
